# Counts in the first sector, and says so when the disk has answered; until the disk has grown. Then it waits for its power button.
size() { cat "/sys/block/$(basename "$(readlink /dev/lab/data)")/size"; }
before=$(size)
connected
# As cloud-init finds it.
modprobe vfat
seed=$(blkid -L cidata)
mount -o ro "$seed" /media
cat /media/user-data /media/meta-data | sed 's/^/seed /'
umount /media
fio --name=load --filename=/dev/lab/data --offset=16m --size=64m --rw=randwrite --bs=16k --ioengine=libaio --iodepth=16 \
    --direct=1 --time_based --runtime=500 --eta=never --output=/tmp/fio &
load=$!
count=0
while [ "$(size)" = "$before" ]; do
    count=$((count + 1))
    printf '%-512s' "$count" | dd of=/dev/lab/data bs=512 count=1 oflag=direct conv=notrunc status=none
    echo "wrote $count"
done
kill $load
echo "size $before $(size)"
dd if=/dev/lab/data bs=1M skip=192 count=1 status=none | tr -d '\0' | wc -c | sed 's/^/behind the old end /'
modprobe button
modprobe evdev
button() { grep -l 'Power Button' /sys/class/input/event*/device/name | head -n 1; }
until [ -n "$(button)" ]; do sleep 0.1; done
device=$(button)
device=${device%/device/name}
echo "waits for the button"
head -c 24 "/dev/input/${device##*/}" >/dev/null && echo "button pressed"
