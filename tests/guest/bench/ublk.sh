# Devices of $whom take turns of a second, in $rounds; then servers are killed and recovered, $pairs times. Images whose every
# cluster is written, one for each device but for raw ones.
modprobe ublk_drv
modprobe nbd max_part=0 || true
mount -o ro /dev/lab/tools /mnt
mkdir -p /tmp/work /run/lock
# Images on a RAM disk, with direct I/O for everyone: past the page cache, and io_uring hands nothing to threads of the kernel. fio has
# one of its own, as the device below. Or images on the disk of the tools, and for fio a file there.
if [ $on_disk = 1 ]; then
    mount -o remount,rw /mnt
    mkdir -p /mnt/work
    cd /mnt/work
    below=$PWD/below.raw
    head -c 128M /dev/zero | tr '\0' '\1' >$below
else
    modprobe brd rd_nr=2 rd_size=1500000 max_part=0
    mke2fs -q -t ext4 -O ^has_journal -m 0 -E nodiscard,lazy_itable_init=0 /dev/ram0
    mount -o discard /dev/ram0 /tmp/work
    cd /tmp/work
    below=/dev/ram1
    head -c 128M /dev/zero | tr '\0' '\1' | dd of=$below bs=1M iflag=fullblock oflag=direct status=none
fi
/mnt/ringdisk image create q.qcow2 128M >/dev/null
for part in 0 64; do
    /mnt/ringdisk io --disk path=q.qcow2 -c "write -P 1 ${part}M 64M" >/dev/null
done
head -c 128M /dev/zero | tr '\0' '\1' >r.raw
sync
# key WHO: as the name of a variable may be.
key() { echo $1 | tr - _; }
# missing WHO REASON: a peer takes no turns, or no more. Nobody of ours may be missing.
missing() {
    case $1 in
    ours-* | device) echo "$*" >&2; exit 1 ;;
    esac
    echo "@missing $*"
    whom=$(for who in $whom; do [ $who = $1 ] || echo $who; done | tr '\n' ' ')
}
# attach WHO ID: makes a device of an image, served in the background.
attach() {
    image=$1.qcow2
    case $1 in
    *raw | *loop*) image=r.raw ;;
    device) image=$below ;;
    esac
    [ -e $image ] || { cp q.qcow2 $image; sync; echo 1 >/proc/sys/vm/drop_caches; }
    device=/dev/ublkb$2
    server=
    case $1 in
    ours-*)
        disk=path=$image,direct=on
        how=auto
        case $1 in
        *raw) disk=$disk,image_type=raw ;;
        *two-queues) disk=$disk,num_queues=2 ;;
        esac
        case $1 in
        *user-copy*) how=user-copy ;;
        *zero-copy) how=zero-copy ;;
        esac
        : >out
        /mnt/ringdisk ublk add --id $2 --disk $disk --transport $how >out 2>$1.err & server=$!
        until [ -s out ]; do sleep 0.05; [ -d /proc/$server ] || { cat $1.err; exit 1; }; done ;;
    rublk-*)
        case $1 in
        *qcow2) what="qcow2 -f $image" ;;
        *loop) what="loop -f $image" ;;
        *loop-z) what="loop -f $image -z" ;;
        esac
        /mnt/rublk add $what -n $2 -q 1 -d 128 >out 2>&1 || true
        for again in $(seq 600); do [ ! -b $device ] || break; sleep 0.05; done
        [ -b $device ] || { missing $1 "makes no device: $(tail -n 1 out)"; return 0; }
        for process in /proc/[0-9]*; do
            if tr '\0' ' ' <$process/cmdline 2>/dev/null | grep -q "rublk add .* -n $2 "; then server=${process#/proc/}; fi
        done
        [ -n "$server" ] || { missing $1 "its process is not found"; return 0; } ;;
    nbd)
        device=/dev/nbd0
        /mnt/qemu-nbd -f qcow2 --cache=none --aio=io_uring -c $device $image >out 2>&1 || true
        for again in $(seq 600); do [ "$(cat /sys/block/nbd0/size)" = 0 ] || break; sleep 0.05; done
        [ "$(cat /sys/block/nbd0/size)" -gt 0 ] || { missing $1 "makes no device: $(tail -n 1 out)"; return 0; } ;;
    device) device=$below ;;
    esac
    echo none >/sys/block/$(basename $device)/queue/scheduler 2>/dev/null || true
    eval "device_$(key $1)=$device server_$(key $1)=$server"
    # Everyone has met the whole image, by each queue.
    for cpu in 0 1; do
        fio --name=warm --filename=$device --size=128m --rw=read --bs=128k --iodepth=16 --direct=1 --ioengine=io_uring \
            --cpus_allowed=$cpu --minimal >/dev/null
    done
}
# detach WHO: of those with a server of ours, or all others.
detach() {
    eval "device=\$device_$(key $1) server=\$server_$(key $1)"
    case $1 in
    ours-*) kill $server; wait $server ;;
    rublk-*) /mnt/rublk del -n ${device#/dev/ublkb} >/dev/null 2>&1; while [ -e $device ]; do sleep 0.05; done ;;
    nbd) /mnt/qemu-nbd -d $device >/dev/null; while [ "$(cat /sys/block/nbd0/size)" -gt 0 ]; do sleep 0.05; done ;;
    esac
}
# has_right_bytes WHO: its device must have the bytes of the image, of which nothing was overwritten yet.
md5_of() { md5sum | cut -c 1-32; }
has_right_bytes() {
    eval "device=\${device_$(key $1):-}"
    [ -n "$device" ] || return 0
    right=$(head -c 16M /dev/zero | tr '\0' '\1' | md5_of)
    [ "$(dd if=$device bs=1M count=16 iflag=direct status=none | md5_of)" = $right ] || missing $1 "reads wrong bytes"
}
# ticks PID: the time that a process has taken of the CPUs, in user and in system mode, in hundredths of a second; none of no process.
ticks() { [ -z "$1" ] || awk '{ sub(/.*\) /, ""); print $12, $13 }' /proc/$1/stat; }
# work WHO FIGURE PATTERN BLOCK DEPTH JOBS [MORE]: one second of it, and the CPU time that its server took for a request.
work() {
    eval "device=\$device_$(key $1) server=\${server_$(key $1):-}"
    before=$(ticks "$server")
    fio --name=job --filename=$device --size=128m --rw=$3 --bs=$4 --iodepth=$5 --numjobs=$6 --group_reporting --direct=1 \
        --ioengine=io_uring --norandommap --randrepeat=0 --time_based --runtime=1 --minimal ${7:-} ${8:-} >fio ||
        { missing $1 "its device fails in $2"; return 0; }
    awk -F';' -v what="@ $1 $2" '{ print what, $8 + $49 }' fio
    [ -z "$server" ] || { cut -d ';' -f 8,49 fio | tr ';' ' '; echo $before; ticks $server; } | tr '\n' ' ' | awk -v what="@ $1 $2" '
        { print what "-user-us", ($5 - $3) * 10000 / ($1 + $2); print what "-system-us", ($6 - $4) * 10000 / ($1 + $2) }'
}
# cpus: how long the CPUs were idle so far, and all of their time.
cpus() { awk '/^cpu / { print $5 + $6, $2 + $3 + $4 + $5 + $6 + $7 + $8 }' /proc/stat; }
# two WHO FIGURE BLOCK DEPTH: a job for each CPU, and so for each queue, and what of the CPUs is left idle, in percent, while both
# are at work: when fio begins and ends, only one of them is.
two() {
    eval "counts=/sys/block/\$(basename \$device_$(key $1))/stat"
    begun=$(awk '{ print $1 + 200 }' $counts)
    work $1 $2 randread $3 $4 2 --cpus_allowed=0,1 --cpus_allowed_policy=split & job=$!
    until [ "$(awk '{ print $1 }' $counts)" -gt $begun ]; do sleep 0.02; done
    sleep 0.2
    before=$(cpus)
    sleep 0.5
    after=$(cpus)
    wait $job
    echo $before $after | awk -v what="@ $1 $2-idle" '{ print what, 100 * ($3 - $1) / ($4 - $2) }'
}
# figure WHO FIGURE: a second of it, if it is for them.
figure() {
    case $2:$1 in
    two-queues-4k:ours-auto | two-queues-4k:ours-two-queues) two $1 $2 4k 32 ;;
    two-queues-128k:ours-user-copy*) two $1 $2 128k 16 ;;
    two-queues-*) ;;
    *:*two-queues | *-4k:ours-user-copy | *-128k:nbd) ;;
    read-4k:*) work $1 $2 randread 4k 32 1 ;;
    write-4k:*) work $1 $2 randwrite 4k 32 1 ;;
    read-128k:*) work $1 $2 read 128k 16 1 ;;
    write-128k:*) work $1 $2 write 128k 16 1 ;;
    esac
}
# All of them are there all the time, and take turns of a second: the machine's speed changes from minute to minute.
turns() {
    id=0
    for one in $whom; do
        attach $one $id
        has_right_bytes $one
        id=$((id + 1))
    done
    for figure in read-4k write-4k read-128k write-128k two-queues-4k two-queues-128k; do
        for round in $(seq $rounds); do
            for one in $whom; do figure $one $figure; done
            whom=$(for who in $whom; do echo $who; done | tac | tr '\n' ' ')
        done
    done
    for one in $whom; do detach $one; done
    /mnt/ringdisk image check ours-auto.qcow2
}
# Killed, and served again: from the kill to the first answer. Then many devices at a time.
recover() {
    attach ours-auto 0
    fio --name=load --filename=$device --size=128m --rw=randrw --bs=4k --iodepth=32 --direct=1 --ioengine=io_uring --time_based \
        --runtime=30 --minimal >/dev/null 2>&1 & load=$!
    sleep 1
    begin=$(date +%s%N)
    kill -9 $server
    wait $server || true
    : >out
    /mnt/ringdisk ublk recover 0 >out 2>err & server=$!
    dd if=$device of=/dev/null bs=4k count=1 iflag=direct status=none
    echo "@ ours-auto recovery-ms $((($(date +%s%N) - begin) / 1000000))"
    kill $load
    wait $load || true
    kill $server
    wait $server
}
# many COUNT: so many busy devices of one server, with a queue for each CPU, which is killed and followed by another.
many() {
    disks=
    for n in $(seq $1); do
        rm -f m$n.qcow2
        /mnt/ringdisk image create m$n.qcow2 16M >/dev/null
        disks="$disks path=m$n.qcow2,direct=on,num_queues=2,queue_size=128"
    done
    : >out
    /mnt/ringdisk ublk add --disk $disks --queues-per-worker 4 >out 2>err & server=$!
    until [ "$(wc -l <out)" = $1 ]; do sleep 0.1; [ -d /proc/$server ] || { cat err; exit 1; }; done
    # One fio with a thread for each: so many processes take seconds to start, and meanwhile the CPUs.
    jobs=
    for device in $(cat out); do jobs="$jobs --name=$(basename $device) --filename=$device"; done
    fio --thread --size=16m --rw=randwrite --bs=4k --iodepth=32 --direct=1 --ioengine=io_uring --time_based --runtime=300 --minimal \
        $jobs >/dev/null 2>&1 & load=$!
    for device in $(cat out); do
        until [ "$(awk '{ print $5 }' /sys/block/$(basename $device)/stat)" -gt 64 ]; do sleep 0.1; done
    done
    sleep 1
    begin=$(date +%s%N)
    kill -9 $server
    wait $server 2>/dev/null || true
    until [ "$(/mnt/ringdisk ublk list --json | tr '{' '\n' | grep -c -i quiesced)" = $1 ]; do sleep 0.05; done
    echo "@ ours-auto teardown-$1-ms $((($(date +%s%N) - begin) / 1000000))"
    begin=$(date +%s%N)
    : >out
    /mnt/ringdisk --log info ublk recover --all --queues-per-worker 4 >out 2>err & server=$!
    until [ "$(wc -l <out)" = $1 ]; do sleep 0.05; [ -d /proc/$server ] || { cat err; exit 1; }; done
    echo "@ ours-auto told-$1-ms $((($(date +%s%N) - begin) / 1000000))"
    # When the last one was live, by the server's log: 2026-01-31T12:34:56.789012Z.
    grep ' recovered ' err | tail -n 1 | awk -F'[T:Z]' -v begin=$begin -v what="@ ours-auto recovery-$1-ms" \
        '{ print what, (($2 * 3600 + $3 * 60 + $4) * 1000 - begin / 1000000 % 86400000 + 86400000) % 86400000 }'
    kill -9 $load
    wait $load 2>/dev/null || true
    kill $server
    wait $server
}
turns
if [ $on_disk = 0 ]; then
    for again in $(seq $pairs); do recover; done
    rm -f *.qcow2
    for again in 1 2 3; do
        many 8
        many 32
    done
fi
