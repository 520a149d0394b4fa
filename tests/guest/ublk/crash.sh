# Images on devices of dm-log-writes, and clients that carry out a plan.
modprobe dm-log-writes
export DM_DISABLE_UDEV=1
cp /mnt/backing.raw .
# lay NAME: puts the image's device under the log, as q.qcow2 beside its backing file.
lay() {
    dmsetup create "$1" --table "0 $(blockdev --getsz /dev/lab/$1) log-writes $(readlink -f /dev/lab/$1) $(readlink -f /dev/lab/$1.log)"
    ln -sf "/dev/mapper/$1" q.qcow2
}
# drive NAME COMMAND…: has a client carry out the plan. A size is shown when all before it is answered. `qemu-io` takes one
# line for each time that there is something to read, so it must not read ahead. The server is stopped as soon as it has
# answered: what it would do next without being asked must not cover for a FLUSH that it answered too early.
drive() {
    name=$1
    shift
    rm -f in out
    mkfifo in out
    "$@" <in >out 2>&1 & client=$!
    [ -n "$server" ] || server=$client
    exec 3>in 4<out
    while read -r line; do
        case $line in
        mark*)
            echo length >&3
            while read -r answer <&4; do
                answer=${answer##*"qemu-io> "}
                case $answer in
                *" MiB") break ;;
                *) echo "complaint $name $answer" ;;
                esac
            done
            kill -STOP $server
            dmsetup message "$name" 0 "$line"
            kill -CONT $server
            ;;
        *) echo "$line" >&3 ;;
        esac
    done <"/mnt/$name.plan"
    exec 3>&-
    sed "s/.*qemu-io> //; /^$/d; s/^/complaint $name /" <&4
    exec 4<&-
    wait $client && echo "client $name 0"
}
# disk DIRECT
disk() { echo "path=q.qcow2,backing_files=on,num_queues=2,direct=$1"; }
# device NAME DIRECT TRANSPORT RECOVERY: works on the image through io_uring, as a block device.
device() {
    lay "$1"
    add "$1" add --disk "$(disk "$2")" --transport "$3" --recovery "$4" --json
    sed "s/^/made $1 /" "$1.out"
    drive "$1" stdbuf -i0 qemu-io -f raw -t none -d unmap /dev/ublkb0
    kill $server
    wait $server && echo "server $1 0" || cat "$1.err"
    dmsetup remove --retry "$1"
}
# syscalls NAME DIRECT: works on the image through plain system calls.
syscalls() {
    lay "$1"
    echo 2 >/proc/sys/kernel/io_uring_disabled
    server=
    drive "$1" /mnt/ringdisk --log warn io --disk "$(disk "$2")"
    echo 0 >/proc/sys/kernel/io_uring_disabled
    dmsetup remove --retry "$1"
}
