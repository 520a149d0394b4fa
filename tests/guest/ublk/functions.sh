# What each script of block devices begins with. The images are in memory; `ringdisk` is on the disk `tools`.
modprobe ublk_drv
mount -o ro /dev/lab/tools /mnt
mkdir -p /tmp/work /run/mnt
cd /tmp/work
ringdisk() { /mnt/ringdisk "$@"; }
# Those that this kernel has, and its own: each transport is one kernel's own, for tests that try it once.
transports="copy user-copy"
own_transports=$transports
if ringdisk ublk features | grep -q AUTO_BUF_REG; then
    transports="$transports zero-copy"
    own_transports=zero-copy
fi
# The last of those.
own_transport=${own_transports##* }
# serve LOG COMMAND…: starts a server in the background, waits for its devices, and leaves its number in $server.
serve() {
    log=$1
    shift
    rm -f "$log.out"
    "$@" >"$log.out" 2>"$log.err" & server=$!
    soon 60 spoken "$log" $server || true
    [ -s "$log.out" ] || { echo "no device:"; cat "$log.err"; exit 1; }
}
# spoken LOG PID: it has told its devices, or has ended.
spoken() { [ -s "$1.out" ] || ! alive $2; }
# Processes that were not waited for count as dead.
alive() {
    { read -r stat </proc/$1/stat; } 2>/dev/null || return 1
    case ${stat##*) } in [ZX]*) return 1 ;; esac
}
# add LOG ARGUMENTS…: serves as root.
add() {
    log=$1
    shift
    serve "$log" /mnt/ringdisk --log info ublk "$@"
}
check() { qemu-img check -q "$1" && echo "flawless $1"; }
# Only leaks may be left by a kill.
sound() {
    status=0
    qemu-img check -q "$1" >/tmp/check 2>&1 || status=$?
    [ $status = 0 ] || [ $status = 3 ] || { cat /tmp/check; exit 1; }
    echo "sound $1"
}
# kept DEVICE FILE: what the device reads as, to be held against its image when that is free. A checksum of it would take
# an emulated processor several times as long.
kept() { dd if="$1" of="$2" bs=1M iflag=direct conv=sparse status=none; }
# same FILE IMAGE NAME: says so if QEMU reads the same from the image, and not a byte more.
same() {
    case $2 in
    *raw) cmp "$1" "$2" ;;
    *) qemu-img compare -f raw -F qcow2 "$1" "$2" >/tmp/compared 2>&1 || true
        echo "Images are identical." | cmp - /tmp/compared || { cat /tmp/compared; false; } ;;
    esac && echo "same $3"
    rm "$1"
}
