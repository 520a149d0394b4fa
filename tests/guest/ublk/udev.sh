# Names and owners by our rules of udev, which runs in the guest.
mkdir -p /etc/udev/rules.d
cp /mnt/60-ringdisk.rules /mnt/60-ringdisk-users.rules /etc/udev/rules.d/
echo 'ublk:x:990:' >>/etc/group
ln -sf /mnt/ringdisk /usr/bin/ringdisk
udev=
# A udev that has read the rules as they are now. It does not do to ask a running one: udev 252 ignores a request that
# comes while it accepts the connection ("Invalid sender uid 65534"), and `udevadm control --reload` ends well nevertheless.
read_rules() {
    if [ "$udev" ]; then
        kill $udev
        wait $udev || true
        rm -f /run/udev/control
    fi
    /mnt/systemd-udevd & udev=$!
    soon 60 test -S /run/udev/control
    /mnt/udevadm settle --timeout=60
}
read_rules
settled() {
    /mnt/udevadm settle --timeout=60
    for link in /dev/disk/by-id/*; do
        [ ! -L "$link" ] || echo "link $1 $(basename "$link") $(readlink "$link")"
    done
}
ringdisk image create a.qcow2 64M >/dev/null
ringdisk image create b.qcow2 64M >/dev/null
add udev add --disk path=a.qcow2,serial=DATA "path=b.qcow2,serial=x y/z" --partitions
settled all
printf '\000\000\000\000\203\000\000\000\000\010\000\000\000\200\000\000' | dd of=/dev/ublkb0 bs=1 seek=446 status=none
printf '\125\252' | dd of=/dev/ublkb0 bs=1 seek=510 conv=fsync status=none
kill -9 $server
wait $server || true
settled orphans
add udev recover --all
settled again
kill $server
wait $server
settled none
add udev add --disk path=a.qcow2,serial=DATA --partitions
soon 60 [ -e /dev/ublkb0p1 ]
settled partition
kill $server
wait $server
settled end

# What a guest has written into the whole disk. Rules newer than these look into ublk devices.
sed 's/|zd\*"/|zd*|ublkb*"/' /mnt/60-persistent-storage.rules >/etc/udev/rules.d/60-persistent-storage.rules
grep -q 'ublkb\*' /etc/udev/rules.d/60-persistent-storage.rules
# contents NAME ARGUMENTS…: whether there is a link by the label of the file system.
contents() {
    name=$1
    shift
    read_rules
    add udev add --disk path=a.qcow2,serial=DATA "$@"
    mkfs.ext4 -q -F -L GUEST /dev/ublkb0
    /mnt/udevadm trigger --action=change --settle /sys/class/block/ublkb0
    settled "contents-$name"
    [ -L /dev/disk/by-label/GUEST ] && echo "contents $name read" || echo "contents $name unread"
    kill $server
    wait $server
}
contents unprotected
cp /mnt/59-ringdisk.rules /etc/udev/rules.d/
contents protected
contents allowed --partitions
# And devices to users of a group.
/mnt/udevadm trigger --action=add /sys/class/misc/ublk-control
settled group
mkdir -p /tmp/user/run
qemu-img create -q -f qcow2 /tmp/user/a.qcow2 64M
chown -R 1000:1000 /tmp/user
serve user setpriv --reuid 1000 --regid 1000 --groups 990 env XDG_RUNTIME_DIR=/tmp/user/run \
    /mnt/ringdisk ublk add --disk path=/tmp/user/a.qcow2
settled user
stat -c '%n %u' /dev/ublkb0 /dev/ublkc0 | sed 's/^/owner /'
kill $server
wait $server && echo "user 0" || cat user.err
