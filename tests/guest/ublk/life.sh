# File systems on devices of one server; who may have what, and who may remove it.
modprobe xfs
for name in a b c; do ringdisk image create $name.qcow2 400M >/dev/null; done
add life add --disk path=a.qcow2,num_queues=2 path=b.qcow2 --id 4 --queues-per-worker 2
tr '\n' ' ' <life.out | sed 's/^/devices /'
echo
ended locked ringdisk ublk add --disk path=a.qcow2
ended taken ringdisk ublk add --disk path=c.qcow2 --id 4
ended missing ringdisk ublk add --disk path=c.qcow2 path=none.qcow2
ringdisk ublk features | grep -q AUTO_BUF_REG || ended zero-copy ringdisk ublk add --disk path=c.qcow2 --transport zero-copy
ended nothing ringdisk ublk del 77
ringdisk ublk list --json | sed 's/^/list /'
ringdisk ublk info 4 --json | sed 's/^/info /'

mkfs.ext4 -q /dev/ublkb4
mkfs.xfs -q -f /dev/ublkb5
mkdir -p /run/ext4 /run/xfs
mount /dev/ublkb4 /run/ext4
mount /dev/ublkb5 /run/xfs
for place in /run/ext4 /run/xfs; do
    verify_files $place --size=16m
    yes junk | head -c 48M >$place/junk
    sync
    rm $place/junk
    sync
    fstrim -v $place | sed 's/^/trimmed /'
done
(cd / && md5sum /run/ext4/verified* /run/xfs/verified* >/tmp/sums)
ended mounted ringdisk ublk del 4
umount /run/ext4 /run/xfs
sleep 1000 </dev/ublkb5 & holder=$!
ended opened ringdisk ublk del 5
kill $holder
wait $holder || true
ended deleted ringdisk ublk del 4
test ! -e /dev/ublkb4 && test ! -e /dev/ublkc4
check a.qcow2
kill $server
wait $server && echo "life 0"
check b.qcow2
ls /run/ringdisk/ublk | wc -l | sed 's/^/remembered /'

# In the background, and found again by others.
/mnt/ringdisk ublk add --disk path=a.qcow2 path=b.qcow2,readonly=on --recovery off --daemonize --pidfile pid | tr '\n' ' ' | sed 's/^/background /'
echo
sed 's/^/served-by /' "/proc/$(cat pid)/comm"
mount /dev/ublkb0 /run/ext4
ended read-only dd if=/dev/zero of=/dev/ublkb1 bs=4k count=1 oflag=direct
mount -o ro,norecovery /dev/ublkb1 /run/xfs
(cd / && md5sum -c --quiet /tmp/sums) && echo "sums fine"
umount /run/ext4 /run/xfs
ended all ringdisk ublk del --all
timeout 20 sh -c 'while [ -e pid ]; do sleep 0.1; done' && echo "pidfile gone"
ringdisk ublk list | wc -l | sed 's/^/left /'
check a.qcow2
check b.qcow2

# A partition table in a guest's disk is the guest's.
ringdisk image create p.qcow2 64M >/dev/null
add parted add --disk path=p.qcow2
printf '\000\000\000\000\203\000\000\000\000\010\000\000\000\200\000\000' | dd of=/dev/ublkb0 bs=1 seek=446 status=none
printf '\125\252' | dd of=/dev/ublkb0 bs=1 seek=510 conv=fsync status=none
kill $server
wait $server
add parted add --disk path=p.qcow2
echo "partitions $(ls -m /dev/ublkb*)"
kill $server
wait $server
add parted add --disk path=p.qcow2 --partitions
# Newer kernels look for them after they have answered.
soon 60 [ -e /dev/ublkb0p1 ]
echo "wanted $(ls -m /dev/ublkb*)"

# Larger while it is served, where the kernel can.
ended grown ringdisk ublk set-size 0 128M
blockdev --getsize64 /dev/ublkb0 | sed 's/^/size /'
ended smaller ringdisk ublk set-size 0 1M
kill $server
wait $server
check p.qcow2
qemu-img info p.qcow2 | sed -n 's/^virtual size/virtual/p'
