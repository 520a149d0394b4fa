# Checks that the files 1 to $expected are whole on both disks; then, unless $last is yes, writes and syncs more and more of
# them, under a load that allocates, copies, overwrites and discards, until something ends it.
content() { seq "$1" "$(($1 + 20000))"; }
[ -z "$(blkid /dev/lab/data)" ] && mkfs.ext4 -q /dev/lab/data
mount /dev/lab/data /mnt

number=0
while [ "$number" -lt $expected ]; do
    number=$((number + 1))
    for place in /mnt /srv; do
        content $number | cmp - $place/kept.$number
    done
done
echo "intact $number"
rm -f /mnt/load.* /srv/load.*
[ $last = no ] || exit 0

for place in /mnt /srv; do
    fio --name=load --directory=$place --size=128m --numjobs=2 --rw=randwrite --bsrange=4k-128k --ioengine=libaio \
        --iodepth=8 --direct=1 --fsync=32 --fallocate=none --time_based --runtime=1000 >/dev/null &
done
(while :; do
    dd if=/dev/zero of=/mnt/junk bs=1M count=4 status=none
    rm /mnt/junk
    fstrim /mnt
done) &
while :; do
    number=$((number + 1))
    for place in /mnt /srv; do
        content $number >$place/kept.$number
        sync $place/kept.$number $place
    done
    echo "synced $number"
done
