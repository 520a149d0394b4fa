# The first boot makes a file system, works on it and restarts; the second finds everything again.
# files FOLDER WHAT: two jobs in files of their own, one on each CPU and so on each queue.
files() {
    job --directory="$1" --bsrange=4k-64k --size=8m --numjobs=2 --cpus_allowed=0,1 --cpus_allowed_policy=split --fsync=64 \
        --fallocate=none "$2"
}

for disk in root data; do
    sed 's/^/cache /' "/sys/block/$(basename "$(readlink /dev/lab/$disk)")/queue/write_cache"
done
if [ ! -e /root/sums ]; then
    mkfs.ext4 -q /dev/lab/data
    mount /dev/lab/data /mnt
    files /mnt --do_verify=1
    files /srv --do_verify=1
    dd if=/dev/urandom of=/mnt/kept bs=1M count=4 conv=fsync status=none
    dd if=/dev/urandom of=/srv/kept bs=1M count=4 conv=fsync status=none
    yes junk | head -c 64M >/mnt/junk
    sync /mnt/junk
    (sha256sum /mnt/kept /srv/kept) >/root/sums
    rm /mnt/junk
    sync # what the journal has not committed is not trimmed
    fstrim -v /mnt | sed 's/^/trimmed /'
    fstrim /
    umount /mnt
    e2fsck -fn /dev/lab/data
    mount /dev/lab/data /mnt
    sha256sum -c /root/sums
    sync
    lab-reboot
    exit
fi

mount /dev/lab/data /mnt
sha256sum -c /root/sums
files /mnt --verify_only=1
files /srv --verify_only=1
umount /mnt
e2fsck -fn /dev/lab/data
for disk in root data; do
    name=$(basename "$(readlink -f "/sys/block/$(basename "$(readlink /dev/lab/$disk)")/device")")
    for queue in 0 1; do
        awk -v queue="$name-req.$queue" '$NF == queue { print "interrupts", $2 + $3 }' /proc/interrupts
    done
done
sed 's/^/sum /' /root/sums
sha256sum /dev/lab/data | sed 's/^/data /'
