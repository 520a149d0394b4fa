# Devices of a configuration file: they come, change and go as it says, and go on when their server is killed or another takes over.
mkdir images
for name in a b c d e; do ringdisk image create images/$name.qcow2 64M >/dev/null; done
ringdisk image create outside.qcow2 64M >/dev/null
ln -s ../outside.qcow2 images/link.qcow2
ctl() { ringdisk ctl --socket control "$@"; }
disk() { sed 's/.*"disk":"\([^"]*\)".*/\1/' /run/ringdisk/ublk/3.json; }
devices() { ctl disk-list | sed '1d' | awk '{ print $1 }' | sort | tr '\n' ' '; }
# file TEXT…: a device of each image, with what more is said of it.
file() {
    {
        printf 'control = "control"\nimages = "images"\n'
        printf '[[rate_limit_group]]\nid = "slow"\nbw_size = "%s"\nbw_refill_time = 1000\n' "$group"
        for device; do printf '[[device]]\nid = "%s"\npath = "images/%s.qcow2"\n%s\n' "${device%%|*}" "${device%%|*}" "${device#*|}"; done
    } >devices.toml
}
group=1G
a='a|serial = "DATA"
num_queues = 2
number = 3'
server() { serve "$1" /mnt/ringdisk --log info serve --config devices.toml ${2:-}; }
file "$a" 'b|rate_limit_group = "slow"
recovery = "wait"'
ended checked ringdisk serve --check --config devices.toml
server first
echo "first $(sort first.out | tr '\n' ' ')"
mkfs.ext4 -q /dev/disk/by-id/ringdisk-DATA
mount /dev/disk/by-id/ringdisk-DATA /run/mnt
verify_files /run/mnt --size=16m --fsync=32 --time_based --runtime=14 & load=$!
# A device comes, limits change, and what a device's users would notice is refused as a whole.
group=2G
file "$a
bw_size = 1000000000
bw_refill_time = 1000" 'b|rate_limit_group = "slow"
recovery = "wait"' 'c|'
ended reload ctl --json reload
echo "then $(devices)"
ended limits ctl --json disk-limits 3
ended group ctl --json group-limits slow
file "$a" 'b|rate_limit_group = "slow"
recovery = "fail"'
ended recovery ctl reload
file "$a
direct = true" 'b|rate_limit_group = "slow"
recovery = "wait"'
ended direct ctl reload
file "$a" 'b|rate_limit_group = "slow"
recovery = "wait"' '../outside|'
ended outside ctl reload
file "$a" 'b|rate_limit_group = "slow"
recovery = "wait"' 'link|'
ended link ctl reload
echo "still $(devices)"
# One in use stays, and goes when it is tried again.
exec 9</dev/ublkb0
file "$a" 'c|'
ended used ctl reload
exec 9<&-
kill -HUP $server
soon 60 [ ! -e /dev/ublkb0 ]
echo "gone $(devices)"
ended asked ctl disk-add --disk path=images/d.qcow2
# What the file says when its server was killed: c is not in it any more, e is new, and nobody notices O_DIRECT. What is not
# of the file has no part in it.
first=$server
add other add --disk path=outside.qcow2 --id 9
kill -9 $first
wait $first || true
file "${a%%num*}
number = 3" 'e|'
ended queues timeout 20 /mnt/ringdisk serve --config devices.toml
file "$a
direct = true" 'e|'
server again
soon 60 [ ! -e /dev/ublkb1 ]
echo "again $(devices)"
echo "opened $(disk)"
dd if=/dev/ublkb2 of=/dev/null bs=4k count=1 iflag=direct status=none
dd if=/dev/ublkb0 of=/dev/null bs=4k count=1 iflag=direct status=none
# The next server takes over from whoever has the socket, and has more.
old=$server
file "$a" 'e|werror = "wait"' 'c|'
server next --takeover
wait $old && echo "old 0"
echo "next $(devices)"
echo "disk $(disk)"
wait $load
echo "load 0"
umount /run/mnt
e2fsck -fn /dev/disk/by-id/ringdisk-DATA >/tmp/fsck 2>&1 || { cat /tmp/fsck; exit 1; }
# The last device goes, and the server stays: one that takes over has nothing but the file.
file
ended emptied ctl reload
ended withdrawn ctl disk-remove 0
echo "empty [$(devices)]"
old=$server
file 'b|'
server last --takeover
wait $old && echo "old 0"
echo "last $(cat last.out)"
kill $server
wait $server && echo "server 0"
ended nobody timeout 20 /mnt/ringdisk serve --config devices.toml --takeover
ringdisk ublk del 9
# Its server was killed while it was written to.
sound images/a.qcow2
for name in b c d e; do check images/$name.qcow2; done
