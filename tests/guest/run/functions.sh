# What each script begins with that runs machines: the images, and `run SCRIPT ARGUMENTS…`, a machine whose console goes to SCRIPT.log.
mount /dev/lab/tools /mnt
cd /mnt
./ringdisk image create -o backing_file=/dev/lab/base,backing_fmt=raw root.qcow2 >/dev/null
./ringdisk image create -o cluster_size=16k data.qcow2 192M >/dev/null
run() {
    script=$1
    shift
    ./ringdisk --log info run --kernel "${KERNEL:-vmlinuz}" --initramfs "$script" --cpus "${CPUS:-2}" \
        --memory "${MEMORY:-512M}" --serial "file=$script.log" \
        --cmdline "console=ttyS0 loglevel=5 panic=1 lab.root=0000:00:01.0 lab.disk=data@0000:00:02.0 lab.disk=frozen@0000:00:03.0" \
        --disk path=root.qcow2,num_queues=2,backing_files=on --disk "${data:-path=data.qcow2,num_queues=2,serial=DATA}" "$@" 2>"$script.err"
}
told() {
    tr -d '\r' <"$1.log" | sed 's/^/inner /'
    sed 's/\x1b\[[0-9;]*m//g; s/^/err /' "$1.err"
}
# A network interface of the machine: what `run` is given for it, and connect, which gives the host's end an address when it is there.
NETWORK="--net tap=tap0,mac=52:54:00:12:34:56 --rng"
connect() {
    soon 60 [ -e /sys/class/net/tap0 ]
    busybox ip addr add 192.0.2.1/24 dev tap0
    busybox ip link set tap0 up
}
# serve SOCKET ARGUMENTS…: has another program of ours offer a disk; leaves its number in $server.
serve() {
    socket=$1
    shift
    ./ringdisk vhost-user --socket "$socket" "$@" & server=$!
    soon 60 [ -S "$socket" ]
}
# stopped: ends that program.
stopped() {
    kill $server
    wait $server && echo "served 0" || echo "served $?"
}
# wait_for SCRIPT TEXT: waits until the machine has said this.
wait_for() {
    soon 240 grep -q "$2" "$1.log" 2>/dev/null || { told "$1"; exit 1; }
}
ctl() { ./ringdisk ctl --socket control --json "$@"; }
# refused NAME ARGUMENTS…: says what a request is answered with that fails.
refused() {
    name=$1
    shift
    ctl "$@" 2>&1 | sed "s/^/$name /" || true
}
