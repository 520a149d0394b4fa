# Devices by what becomes of their I/O without a server: which of them can have another one.
# works DEVICE: it is served, and by whom.
works() {
    dd if=/dev/urandom of=/dev/ublkb$1 bs=64k count=1 oflag=direct status=none
    [ "$(ringdisk ublk info $1 --json | grep -o '"pid":[0-9]*')" = "\"pid\":$2" ] && echo "works $1"
}
ringdisk image create c.qcow2 64M >/dev/null
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
