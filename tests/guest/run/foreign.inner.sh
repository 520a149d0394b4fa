# Works on the disk, lets it go when it is asked to, and finds everything again when it comes back.
far() { grep -lx FAR /sys/block/vd*/serial 2>/dev/null | cut -d/ -f4; }
wait_far() { until disk=$(far) && [ -n "$disk" ]; do sleep 0.1; done; }
echo "say ready"
wait_far
echo "found $disk of $(ls /sys/block/$disk/mq | wc -l) queues"
mkfs.ext4 -q /dev/$disk
mount /dev/$disk /mnt
verify_files /mnt --numjobs=1
sha256sum /mnt/verified* >/root/sums
umount /mnt
echo "say unmounted"
while [ -n "$(far)" ]; do sleep 0.1; done
echo "say gone"
wait_far
mount /dev/$disk /mnt
sha256sum -c /root/sums
umount /mnt
