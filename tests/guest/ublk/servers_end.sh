# The end of the servers of servers.sh, and of others.
kill -INT $load
wait $load || [ $? = 128 ] || { cat /tmp/fio *.err; exit 1; }
! grep -E 'err= *[1-9]|verify:|error' /tmp/fio || { cat /tmp/fio; exit 1; }
echo "load 0"
for id in 0 1 2 3 4 5 6 7 8; do kept /dev/ublkb$id kept.$id; done
# What the host knows of a disk, and what its workers may wait for when memory is short.
limits="logical_block_size max_hw_sectors_kb dma_alignment optimal_io_size discard_granularity fua chunk_sectors"
for name in $limits write_cache; do echo "$name $(cat /sys/block/ublkb0/queue/$name)"; done | tr '\n' ' ' | sed 's/^/limits /'
echo
# Those that were killed had made it shorter.
cat /sys/block/ublkb*/queue/io_timeout | sort | uniq -c | tr -s ' \n' ' ' | sed 's/^/timeouts/'
echo
for task in /proc/$server/task/*; do
    case $(cat $task/comm) in
    ublk*)
        set -- $(sed 's/.*) //' $task/stat)
        # PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE.
        [ $(($7 & 0x180000)) = $((0x180000)) ] && echo flusher || echo "waits for itself: $7"
        ;;
    esac
done | sort | uniq -c | tr -s ' \n' ' ' | sed 's/^/workers/'
echo
kill $server
wait $server && echo "server 0"
for id in 0 1 2 3 4 5 6 7 8; do
    sound $(image $id)
    same kept.$id $(image $id) $id
done

# Recovered again, and removed, when a recovery has begun and its server has died.
moments="050 200"
[ "$own_transports" != zero-copy ] || moments=100
for ms in $moments; do
    add gone add --id 0 --disk $(disk 0),num_queues=2 $(disk 1)
    kill -9 $server
    wait $server || true
    /mnt/ringdisk ublk recover --all >/dev/null 2>&1 & dead=$!
    sleep 0.$ms
    kill -9 $dead
    wait $dead || true
    ended resumed ringdisk ublk recover --all --daemonize
    ended removed ringdisk ublk del --all --force
done
ringdisk ublk list | wc -l | sed 's/^/remaining /'
sound $(image 0)

# A device that goes with its server has no request wait for one.
dmesg | grep -c 'I/O error' | sed 's/^/errors /' || true
add off add --id 0 --disk $(disk 0),ops_size=1,ops_refill_time=60000 --recovery off
looks=
for n in 1 2 3; do
    dd if=/dev/ublkb0 of=/dev/null bs=4k count=1 skip=$n iflag=direct status=none 2>/dev/null & looks="$looks $!"
done
sleep 1
kill -9 $server
wait $server || true
began=$(date +%s)
failed=0
for look in $looks; do wait $look || failed=$((failed + 1)); done
echo "failed $failed in $(($(date +%s) - began)) s"
