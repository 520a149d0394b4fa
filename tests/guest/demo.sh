# What the guest of the demo does. Lines that begin with `* ` are shown.
echo "* Linux $(uname -r), $(nproc) CPUs, root on $(readlink /dev/lab/root) ($(df -h --output=size / | tail -n 1 | tr -d ' '))"
echo "* it sees a virtio-blk disk of $(ls /sys/block/vda/mq | wc -l) queues, cache: $(cat /sys/block/vda/queue/write_cache)"

mkdir -p /srv/demo
number=0
while [ "$number" -lt 200 ]; do
    number=$((number + 1))
    seq "$number" "$((number + 5000))" >/srv/demo/file.$number
done
sync
(cd /srv/demo && sha256sum file.* >/root/sums)
echo "* wrote and synced $number files"

fio --name=demo --directory=/srv --size=32m --numjobs=2 --cpus_allowed=0,1 --cpus_allowed_policy=split \
    --rw=randwrite --bs=4k --ioengine=libaio --iodepth=32 --direct=1 --fsync=256 --fallocate=none \
    --verify=xxhash --do_verify=1 --verify_fatal=1 --eta=never --output=/dev/shm/fio || { cat /dev/shm/fio; exit 1; }
grep -E '^ *(read|write): IOPS' /dev/shm/fio | sed 's/^ */* fio, 4 KiB random with verify: /'

rm /srv/demo.*
echo "* fstrim $(fstrim -v /)"

echo 3 >/proc/sys/vm/drop_caches
(cd /srv/demo && sha256sum --quiet -c /root/sums)
echo "* read all files back from the disk: every checksum is right"
