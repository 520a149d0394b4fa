# Verifies what it writes, while the server of its disk is killed.
mkfs.ext4 -q /dev/lab/data
mount -o noatime /dev/lab/data /mnt
echo ready
for round in 1 2 3 4 5 6; do
    verify_files /mnt --randseed=$round
done
umount /mnt
e2fsck -fn /dev/lab/data
