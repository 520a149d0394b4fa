# Devices that come, work, are killed, go on and go, for $seconds; and a server that works through all of it.
# grown WHEN: what the long-lived server has.
grown() {
    # Without shared memory, which is not the allocator's.
    rss=$(awk '/^Rss(Anon|File)/ { sum += $2 } END { print sum }' /proc/$keeper/status)
    echo "grown $1 rss $rss files $(ls /proc/$keeper/fd | wc -l) threads $(ls /proc/$keeper/task/*/comm |
        xargs grep -L '^iou-' | wc -l)"
}
for name in kept a b; do ringdisk image create -o cluster_size=16k $name.qcow2 64M >/dev/null; done
truncate -s 64M r.raw
add keeper add --disk path=kept.qcow2,num_queues=2 path=r.raw,image_type=raw --id 10
keeper=$server
# With user copy each tag keeps memory for the largest request that it has had. All of them have had the largest before anything is
# measured: a queue's tags are taken in turn.
for dev in /dev/ublkb10 /dev/ublkb11; do
    for cpu in 0 1; do
        fio --name=warm --filename=$dev --cpus_allowed=$cpu --ioengine=libaio --iodepth=32 --direct=1 --rw=randwrite --bs=256k --size=64m \
            --eta=never --output=/tmp/warm || { cat /tmp/warm; exit 1; }
    done
done
# A worker has a timer from the first discard on that it frees, a second later; meanwhile no other worker makes one.
for cpu in 0 1; do
    taskset -c $cpu blkdiscard -o ${cpu}M -l 1M /dev/ublkb10
    sleep 2
done
cycle=0 kills=0 began=$(awk '{ print int($1) }' /proc/uptime)
until [ $cycle -ge 4 ] && [ $(($(awk '{ print int($1) }' /proc/uptime) - began)) -ge $seconds ]; do
    [ $cycle != 1 ] || grown before
    set -- $transports
    shift $((cycle % $#))
    how="--id 1 --transport $1 --queues-per-worker $((cycle % 2 + 1))"
    # Those that live long: what they hold changes kind all the time.
    verify /dev/ublkb10 --randseed=$cycle --numjobs=2 --offset_increment=24m --size=12m
    blkdiscard -o $((cycle % 40))M -l 20M /dev/ublkb10
    verify /dev/ublkb11 --randseed=$cycle --size=8m
    for ask in 1 2 3; do ringdisk ublk info 10 >/dev/null; done
    # And those that come and go.
    add cycle add --disk path=a.qcow2,num_queues=2 path=b.qcow2,queue_size=32 $how
    fio --name=load --filename=/dev/ublkb1 --ioengine=libaio --iodepth=16 --direct=1 --bsrange=4k-64k --rw=randwrite --size=12m \
        --verify=xxhash --verify_fatal=1 --do_verify=1 --randseed=$cycle --eta=never --output=/tmp/load & load=$!
    case $((cycle % 3)) in
    0 | 1)
        for again in 1 2; do
            sleep 0.$((cycle % 7 + 1))
            kill -9 $server
            wait $server 2>/dev/null || true
            kills=$((kills + 1))
            add cycle recover 1 2
        done
        ;;
    esac
    wait $load || { echo "data lost"; cat /tmp/load; exit 1; }
    verify /dev/ublkb2 --randseed=$cycle --size=4m
    if [ $((cycle % 2)) = 0 ]; then ringdisk ublk del 1 2; else kill $server; fi
    wait $server || { echo "server failed"; cat cycle.err; exit 1; }
    sound a.qcow2 >/dev/null
    sound b.qcow2 >/dev/null
    cycle=$((cycle + 1))
done
grown after
kill $keeper
wait $keeper && echo "keeper 0"
check kept.qcow2
ringdisk ublk list | wc -l | sed 's/^/left /'
ls /run/ringdisk/ublk | wc -l | sed 's/^/remembered /'
echo "soaked $cycle cycles, $kills kills, in $(($(awk '{ print int($1) }' /proc/uptime) - began)) s"
