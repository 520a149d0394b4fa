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
for transport in $own_transports; do
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
    # A snapshot under the server's sandbox; it outlives the server, and the device goes back to it.
    head -c 1M /dev/urandom >moment
    dd if=moment of=/dev/ublkb1 bs=1M seek=16 oflag=direct status=none
    ended "snapshot $transport" ringdisk ublk snapshot create 1 moment
    ended "taken $transport" ringdisk ublk snapshot create 1 moment
    ended "raw $transport" ringdisk ublk snapshot create 2 moment
    dd if=/dev/zero of=/dev/ublkb1 bs=1M seek=16 count=1 oflag=direct status=none
    ended "more $transport" ringdisk ublk snapshot create 1 more
    ended "less $transport" ringdisk ublk snapshot delete 1 name=more
    kill -9 $server
    wait $server || true
    add box recover --all
    threads $transport
    ringdisk ublk snapshot list 1 | sed "s/^/listed $transport /"
    exec 9>/dev/ublkb1
    ended "used $transport" ringdisk ublk snapshot apply 1 moment
    exec 9>&-
    ended "applied $transport" ringdisk ublk snapshot apply 1 moment
    dd if=/dev/ublkb1 bs=1M skip=16 count=1 iflag=direct status=none | cmp - moment && echo "back $transport"
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
    check b.qcow2
    qemu-img convert -f qcow2 -O raw -l snapshot.name=moment b.qcow2 b.raw
    dd if=b.raw bs=1M skip=16 count=1 status=none | cmp - moment && echo "moment $transport"
    qemu-img snapshot -d moment b.qcow2
    rm b.raw a.qcow2
    ringdisk image create a.qcow2 64M >/dev/null
    grep -E 'WARN|ERROR' box.err | grep -v 'the removed device is still open' | sed "s/^/logged $transport /" || true
done
ls /run/ringdisk/ublk | wc -l | sed 's/^/remembered /'
add free add --disk path=a.qcow2 --sandbox off
threads off
kill $server
wait $server
