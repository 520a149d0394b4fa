# An image on a logical volume, filled to its last cluster, twice made larger, and discarded.
modprobe dm-mod
export DM_DISABLE_UDEV=1
pv=$(readlink -f /dev/lab/pv)
quietly pvcreate -y $pv
quietly vgcreate vg $pv
quietly lvcreate -y -Wn -Zn -L 24M -n disk vg
image=/dev/vg/disk
quietly qemu-img create -q -f qcow2 $image 64M
head -c 72M /dev/urandom >noise
truncate -s 64M model.raw
# keep FROM COUNT: what the disk holds from now on, in clusters.
keep() { dd if=noise of=model.raw bs=64k skip=$1 seek=$1 count=$2 conv=notrunc status=none; }
# fill: writes on from cluster $at until there is no room.
at=0
fill() {
    ! dd if=noise of=/dev/ublkb0 bs=64k skip=$at seek=$at oflag=direct 2>/tmp/dd
    written=$(sed -n 's/+0 records out$//p' /tmp/dd)
    keep $at $written
    at=$((at + written))
    echo "filled $1 $at $(grep -o 'No space left on device' /tmp/dd)"
}
add lvm add --disk path=$image,direct=on,num_queues=2
fill first
# Full, it still reads, overwrites and makes durable.
dd if=noise of=/dev/ublkb0 bs=64k skip=300 count=16 oflag=direct conv=notrunc,fsync status=none && echo "overwritten 0"
dd if=noise of=model.raw bs=64k skip=300 count=16 conv=notrunc status=none
kept /dev/ublkb0 kept.raw
cmp kept.raw model.raw && echo "full 0"
rm kept.raw
quietly lvextend -L 40M $image
fill second
# What is discarded is room, without a FLUSH, and reads as zeros.
blkdiscard -l 6M /dev/ublkb0
fallocate -p -o 6M -l 2M /dev/ublkb0
dd if=/dev/zero of=model.raw bs=1M count=8 conv=notrunc status=none
fill third
# Zeros that stay reserved.
blkdiscard -z -o 10M -l 3M /dev/ublkb0
dd if=/dev/zero of=model.raw bs=1M seek=10 count=3 conv=notrunc status=none
kept /dev/ublkb0 kept.raw
cmp kept.raw model.raw && echo "kept 0"
rm kept.raw
quietly lvextend -L 44M $image
ended grown ringdisk ublk set-size 0 72M
kill $server
wait $server && echo "server 0" || cat lvm.err
check $image
# The other ring, from where the first one stopped.
echo 2 >/proc/sys/kernel/io_uring_disabled
size=$(qemu-img info --output=json -f qcow2 $image | sed -n 's/.*"virtual-size": \([0-9]*\),.*/\1/p' | tail -n 1)
echo "size $size"
truncate -s $size model.raw
commands=
from=$at
while [ $at -lt $((size / 65536)) ]; do
    commands="$commands
write -q -P 77 $((at * 64))k 64k"
    at=$((at + 1))
done
written() { ringdisk --log error io --disk path=$image >/tmp/said 2>&1 && echo "io 0" || echo "io $(sort -u /tmp/said | tr '\n' ' ')"; }
echo "$commands" | written
quietly lvextend -L 80M $image
echo "$commands" | written
tr '\000' '\115' </dev/zero | dd of=model.raw bs=64k seek=$from count=$((at - from)) iflag=fullblock conv=notrunc status=none
# On both rings the volume below hears of discards.
echo "discard -q 20M 4M" | written
echo 0 >/proc/sys/kernel/io_uring_disabled
add lvm add --disk path=$image,direct=on
blkdiscard -o 24M -l 4M /dev/ublkb0
kill $server
wait $server
dd if=/dev/zero of=model.raw bs=1M seek=20 count=8 conv=notrunc status=none
check $image
qemu-img compare -f raw -F qcow2 model.raw $image
quietly vgchange -an vg
