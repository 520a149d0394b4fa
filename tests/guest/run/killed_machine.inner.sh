# Keeps a file, and is killed under load; started again, it looks for the file.
mount -o noatime /dev/lab/data /mnt 2>/dev/null || { mkfs.ext4 -q /dev/lab/data; mount /dev/lab/data /mnt; }
if [ -e /mnt/kept ]; then
    sha256sum -c /mnt/sums
    umount /mnt
    e2fsck -fn /dev/lab/data
    exit
fi
dd if=/dev/urandom of=/mnt/kept bs=64k count=16 conv=fsync status=none
(cd / && sha256sum /mnt/kept >/mnt/sums)
sync
echo ready
fio --name=load --directory=/mnt --size=32m --rw=randrw --bsrange=4k-64k --ioengine=libaio --iodepth=16 --direct=1 \
    --fsync=16 --time_based --runtime=60 --eta=never --output=/tmp/fio
