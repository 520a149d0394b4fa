# Devices of a user without rights, where the machine lets them.
mkdir -p /tmp/user/run
qemu-img create -q -f qcow2 /tmp/user/a.qcow2 64M
chown -R 1000:1000 /tmp/user
# as USER COMMAND…
as() {
    user=$1
    shift
    setpriv --reuid "$user" --regid "$user" --clear-groups env XDG_RUNTIME_DIR=/tmp/user/run "$@"
}
mine="ublk add --disk path=/tmp/user/a.qcow2,num_queues=2,serial=USER"
ended closed as 1000 /mnt/ringdisk $mine
# What udev does by our rules for users.
chmod 666 /dev/ublk-control
give() {
    while :; do
        for node in /dev/ublk[bc]*; do
            RINGDISK_OWNER=
            eval "$(ringdisk ublk udev --owner "${node#/dev/}" 2>/dev/null)"
            [ -z "$RINGDISK_OWNER" ] || chown "$RINGDISK_OWNER:$RINGDISK_GROUP" "$node" 2>/dev/null || true
        done
        sleep 0.1
    done
}
give & giver=$!
ringdisk image create root.qcow2 64M >/dev/null
add root add --disk path=root.qcow2 --id 0
root=$server
ended transport as 1000 /mnt/ringdisk $mine --transport user-copy
serve user as 1000 /mnt/ringdisk --log info $mine --json
sed 's/^/made /' user.out
given() { [ "$(stat -c %u /dev/ublkb1)" = 1000 ]; }
soon 30 given
stat -c '%u' /dev/ublkb0 /dev/ublkc0 /dev/ublkb1 /dev/ublkc1 | tr '\n' ' ' | sed 's/^/owners /'
echo
as 1000 fio --name=verified --filename=/dev/ublkb1 --ioengine=libaio --iodepth=16 --direct=1 --bsrange=4k-256k --rw=randwrite \
    --size=24m --verify=xxhash --verify_fatal=1 --do_verify=1 --eta=never --output=/tmp/user/fio >&2 ||
    { cat /tmp/user/fio; exit 1; }
echo "verified 0"
as 1000 /mnt/ringdisk ublk list | sed 's/^/theirs /'
ringdisk ublk list | sed 's/^/all /'
as 1000 /mnt/ringdisk ublk info 1 --json | sed 's/^/info /'
ended foreign as 1001 /mnt/ringdisk ublk del 1
ended roots as 1000 /mnt/ringdisk ublk del 0
head -c 4M /dev/urandom >/tmp/user/noise
as 1000 dd if=/tmp/user/noise of=/dev/ublkb1 bs=1M conv=fsync status=none
ended deleted as 1000 /mnt/ringdisk ublk del 1
wait $server && echo "server 0" || { cat user.err; exit 1; }
qemu-img convert -f qcow2 -O raw /tmp/user/a.qcow2 a.raw
cmp -n 4194304 a.raw /tmp/user/noise && echo "same 0"
check /tmp/user/a.qcow2
# Nobody gives it to them.
kill $giver
wait $giver || true
ended ungiven as 1000 /mnt/ringdisk $mine
ended swept ringdisk ublk del --all
wait $root
ringdisk ublk list | wc -l | sed 's/^/left /'
