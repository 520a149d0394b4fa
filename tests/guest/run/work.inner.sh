# Works on its disks for so many `rounds`, restarts, and finds everything again. With `network=yes` bytes come each time, and go once.
for disk in data frozen; do
    name=$(basename "$(readlink /dev/lab/$disk)")
    echo "disk $disk $(cat /sys/block/$name/size) ro=$(cat /sys/block/$name/ro) serial=$(cat /sys/block/$name/serial)"
done
if [ $network = yes ]; then
    connected
    soon 20 busybox wget -q -O /tmp/bytes http://192.0.2.1/bytes
    sha256sum </tmp/bytes | sed 's/^/fetched /'
    modprobe virtio_rng
    soon 20 grep -q virtio_rng /sys/class/misc/hw_random/rng_current
    head -c 64k /dev/hwrng | gzip | wc -c | sed 's/^/random /'
fi
if [ ! -e /root/sums ]; then
    [ $network = no ] || busybox nc 192.0.2.1 9000 </tmp/bytes
    head -c 4096 /dev/lab/frozen | sha256sum | sed 's/^/frozen /'
    dd if=/dev/zero of=/dev/lab/frozen bs=4k count=1 2>/dev/null && echo "a read-only disk was written"
    mkfs.ext4 -q /dev/lab/data
    mount -o noatime /dev/lab/data /mnt
    echo ready
    for round in $(seq $rounds); do
        verify_files /mnt --cpus_allowed=0,1 --cpus_allowed_policy=split --randseed=$round
    done
    dd if=/dev/urandom of=/srv/kept bs=64k count=16 conv=fsync status=none
    sha256sum /mnt/verified* /srv/kept >/root/sums
    sync
    fstrim -v /mnt | sed 's/^/trimmed /'
    umount /mnt
    lab-reboot
    exit
fi
mount /dev/lab/data /mnt
sha256sum -c /root/sums
umount /mnt
e2fsck -fn /dev/lab/data
name=$(basename "$(readlink -f "/sys/block/$(basename "$(readlink /dev/lab/data)")/device")")
for queue in 0 1; do
    awk -v queue="$name-req.$queue" '$NF == queue { print "interrupts", $2 + $3 }' /proc/interrupts
done
sha256sum /dev/lab/data | sed 's/^/data /'
