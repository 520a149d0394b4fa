# Sixteen devices with four queues each, all of them busy when the server is killed.
count=16
disks=
for n in $(seq 0 $((count - 1))); do
    ringdisk image create m$n.qcow2 16M >/dev/null
    disks="$disks path=m$n.qcow2,num_queues=4,queue_size=128"
done
for how in $own_transport; do
    began=$(now)
    add many add --disk $disks --queues-per-worker 4 --transport $how
    served many $count
    echo "added $how $(($(now) - began)) ms"
    ringdisk ublk info 0 --json | sed 's/^/info /'
    loads=
    for n in $(seq 0 $((count - 1))); do
        fio --name=load --filename=/dev/ublkb$n --size=8m --rw=randwrite --bs=4k --iodepth=32 --direct=1 --ioengine=libaio \
            --verify=xxhash --verify_fatal=1 --do_verify=1 --time_based --runtime=8 --eta=never --output=/tmp/fio.$n & loads="$loads $!"
    done
    sleep 3
    began=$(now)
    kill -9 $server
    wait $server || true
    state quiesced $count
    echo "quiesced $how $(($(now) - began)) ms"
    began=$(now)
    add again recover --all --queues-per-worker 4
    served again $count
    echo "recovered $how $(($(now) - began)) ms"
    good=0
    for load in $loads; do
        wait $load && good=$((good + 1))
    done
    echo "loads $how $good"
    [ $good = $count ] || { cat /tmp/fio.*; exit 1; }
    n=3
    kept /dev/ublkb$n kept.raw
    began=$(now)
    kill $server
    wait $server && echo "closed $how $(($(now) - began)) ms"
    for n in $(seq 0 $((count - 1))); do sound m$n.qcow2 >/dev/null; done
    same kept.raw m3.qcow2 $how
done
ringdisk ublk list | wc -l | sed 's/^/left /'

# Recovered all, or none: one whose image is another leaves those before it as they were.
ringdisk image create small.qcow2 8M >/dev/null
add two add --disk path=m0.qcow2,num_queues=4 path=m1.qcow2,num_queues=4
served two 2
kill -9 $server
wait $server || true
state quiesced 2
dd if=/dev/ublkb0 of=/dev/null bs=4k count=1 iflag=direct status=none & waiting=$!
ended other ringdisk ublk recover 0 1 --disk path=m0.qcow2 path=small.qcow2
state quiesced 2
[ -d /proc/$waiting ] && echo "still waiting"
add again recover --all
served again 2
wait $waiting && echo "answered"
kill $server
wait $server && echo "server 0"
