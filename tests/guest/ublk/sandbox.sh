# Which threads are inside the sandbox, and whether everything can be done there.
# threads NAME: of how many threads of the server how many are confined, with no new privileges to be had.
threads() {
    total=0 confined=0
    for status in /proc/$server/task/*/status; do
        # The kernel's own, which run nothing of ours.
        ! grep -q '^Name:[[:space:]]*iou-' $status || continue
        total=$((total + 1))
        ! grep -q '^Seccomp:[[:space:]]*2' $status || ! grep -q '^NoNewPrivs:[[:space:]]*1' $status || confined=$((confined + 1))
    done
    echo "threads $1 $total $confined"
}
ringdisk image create a.qcow2 64M >/dev/null
ringdisk image create b.qcow2 64M >/dev/null
truncate -s 64M r.raw
for transport in $own_transport; do
    add box add --disk path=a.qcow2,num_queues=2,serial=BOX path=b.qcow2,queue_size=64 path=r.raw,image_type=raw --transport $transport
    threads $transport
    [ -e /dev/disk/by-id/ringdisk-BOX ]
    for dev in /dev/ublkb0 /dev/ublkb2; do
        verify $dev --numjobs=2 --offset_increment=24m --size=8m
        blkdiscard -o 1M -l 8M $dev
        blkdiscard -z -o 10M -l 3M $dev
    done
    ringdisk ublk info 0 --json | sed "s/^/info $transport /"
    ended "grown $transport" ringdisk ublk set-size 0 128M
    ended "shrunk $transport" ringdisk ublk set-size 0 64M
    kill -9 $server
    wait $server || true
    add box recover --all
    threads $transport
    verify /dev/ublkb1 --offset=32m --size=8m
    ended "deleted $transport" ringdisk ublk del 2
    # What somebody has written without waiting for the disk, and has still open: it is in the image in the end.
    head -c 4M /dev/urandom >noise
    exec 9>/dev/ublkb1
    cat noise >&9
    kill $server
    wait $server && echo "server $transport 0"
    exec 9>&-
    qemu-img convert -f qcow2 -O raw b.qcow2 b.raw
    cmp -n 4194304 noise b.raw && echo "kept $transport"
    [ -L /dev/disk/by-id/ringdisk-BOX ] || echo "unnamed $transport"
    rm b.raw a.qcow2
    check b.qcow2
    ringdisk image create a.qcow2 64M >/dev/null
    grep -E 'WARN|ERROR' box.err | grep -v 'the removed device is still open' | sed "s/^/logged $transport /" || true
done
ls /run/ringdisk/ublk | wc -l | sed 's/^/remembered /'
add free add --disk path=a.qcow2 --sandbox off
threads off
kill $server
wait $server
