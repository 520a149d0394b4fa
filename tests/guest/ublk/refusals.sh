# What keeps a server from being replaced, found before it is asked; and what does not.
for name in a b c; do ringdisk image create $name.qcow2 64M >/dev/null; done
# works DEVICE: it is served, and by whom.
works() {
    dd if=/dev/urandom of=/dev/ublkb$1 bs=64k count=1 oflag=direct status=none
    [ "$(ringdisk ublk info $1 --json | grep -o '"pid":[0-9]*')" = "\"pid\":$2" ] && echo "works $1"
}
ended nothing ringdisk ublk upgrade 7
ended none ringdisk ublk upgrade --all
add one add --disk path=a.qcow2,num_queues=2 path=b.qcow2 --id 0 --queues-per-worker 2
one=$server
ended part ringdisk ublk upgrade 0
works 0 $one
mv b.qcow2 aside
ended missing ringdisk ublk upgrade 0 1
head -c 100 aside >b.qcow2
ended broken ringdisk ublk upgrade --all
mv aside b.qcow2
works 1 $one
kill -STOP $one
ended silent ringdisk ublk upgrade 0 1
kill -CONT $one
works 0 $one
mv /run/ringdisk/ublk/1.json aside
ended forgotten ringdisk ublk upgrade 0 1
mv aside /run/ringdisk/ublk/1.json
works 1 $one

# Into the background, from another folder.
(cd / && ringdisk ublk upgrade --all --daemonize) | tr '\n' ' ' | sed 's/^/background /'
echo
wait $one && echo "one 0"
two=$(ringdisk ublk info 0 --json | sed 's/.*"pid":\([0-9]*\).*/\1/')
works 0 $two
works 1 $two
ringdisk ublk info 0 --json | grep -o '"workers":[0-9]*' | sed 's/^/threads /'
# Nobody serves it any more.
kill -9 $two
while [ -d /proc/$two ]; do sleep 0.05; done
ended unserved ringdisk ublk upgrade 0 1
add three recover --all
works 0 $server
works 1 $server
ended deleted ringdisk ublk del --all
wait $server && echo "three 0"
check a.qcow2
check b.qcow2

recoveries=off
! ringdisk ublk features | grep -q USER_RECOVERY_FAIL_IO || recoveries="off fail"
for recovery in $recoveries; do
    add other add --disk path=c.qcow2 --id 3 --recovery $recovery
    ended $recovery ringdisk ublk upgrade 3
    works 3 $server
    ended deleted ringdisk ublk del 3
    wait $server
done
# A device whose I/O must not be done again.
add other add --disk path=c.qcow2,num_queues=2 --id 3 --recovery wait
if ringdisk ublk features | grep -q QUIESCE; then
    fio --name=load --filename=/dev/ublkb3 --size=24m --numjobs=2 --offset_increment=32m --rw=randwrite --bsrange=4k-64k \
        --ioengine=libaio --iodepth=200 --direct=1 --verify=xxhash --verify_backlog=100 --verify_fatal=1 --do_verify=1 \
        --time_based --runtime=8 --allow_file_create=0 --eta=never --output=/tmp/fio & load=$!
    for round in 1 2 3; do
        sleep 1
        old=$server
        add next upgrade 3
        wait $old && echo "wait upgraded"
    done
    wait $load || { cat /tmp/fio; exit 1; }
    echo "wait load 0"
else
    ended wait ringdisk ublk upgrade 3
    works 3 $server
fi
kill $server
wait $server && echo "four 0"
check c.qcow2
