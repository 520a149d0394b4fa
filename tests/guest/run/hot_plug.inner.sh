# Finds hot-plugged disks by their serial numbers, and does what `say` tells the outer script that it waits for.
named() { grep -lx $1 /sys/block/vd*/serial 2>/dev/null | cut -d/ -f4; }
wait_named() { until disk=$(named $1) && [ -n "$disk" ]; do sleep 0.1; done; }
hot() { named HOT; }
wait_hot() { wait_named HOT; }
wait_gone() { while [ -n "$(named $1)" ]; do sleep 0.1; done; }
address() { basename "$(readlink -f "/sys/block/$disk/device/..")"; }
size() { cat "/sys/block/$disk/size"; }
slots() { ls /sys/bus/pci/slots | sort -n | tr '\n' ' '; }
if [ -e /root/sums ]; then
    # After the restart: the added disk is there from the start, the one that was to go is not.
    wait_hot
    echo "after the restart $disk at $(address), data $(grep -cx DATA /sys/block/vd*/serial | grep -c ':1$')"
    mount /dev/$disk /mnt
    sha256sum -c /root/sums
    umount /mnt
    wait_named FAR
    mount /dev/$disk /mnt
    sha256sum -c /root/far
    umount /mnt
    exit
fi
echo "slots $(slots)"
echo "cpus $(nproc)"
echo "say ready"
wait_hot
echo "found $disk at $(address) $(size)"
mkfs.ext4 -q /dev/$disk
mount /dev/$disk /mnt
verify_files /mnt --cpus_allowed=0,1 --cpus_allowed_policy=split
sha256sum /mnt/verified* >/root/sums
umount /mnt
echo "say unmounted"
wait_gone HOT
echo "say gone"
wait_hot
mount /dev/$disk /mnt
sha256sum -c /root/sums
umount /mnt
before=$(size)
echo "say again"
while [ "$(size)" = "$before" ]; do sleep 0.1; done
echo "grown $before $(size)"
# Under load, and without being asked.
fio --name=load --filename=/dev/$disk --offset=96m --size=64m --rw=randwrite --bs=16k --ioengine=libaio --iodepth=16 \
    --direct=1 --time_based --runtime=500 --eta=never --output=/tmp/fio &
load=$!
sleep 2
slot=$(address); slot=${slot#*:*:}; slot=$((0x${slot%.*}))
echo 0 >/sys/bus/pci/slots/$slot/power
[ -z "$(hot)" ] && echo "let go"
wait $load 2>/dev/null || echo "the load has failed"
echo "say let go"
wait_hot
echo "back $disk at $(address)"
# The disk of another program: worked on, let go of when it is asked for, and found again when it comes back.
echo "say far"
wait_named FAR
echo "far $disk of $(ls /sys/block/$disk/mq | wc -l) queues"
mkfs.ext4 -q /dev/$disk
mount /dev/$disk /mnt
verify_files /mnt --numjobs=1
sha256sum /mnt/verified* >/root/far
umount /mnt
echo "say far unmounted"
wait_gone FAR
echo "say far gone"
wait_named FAR
mount /dev/$disk /mnt
sha256sum -c /root/far
umount /mnt
echo "say restart"
until [ -e /run/asked ]; do
    grep -q DATA /sys/block/vd*/serial || touch /run/asked
    sleep 0.1
done
lab-reboot
