# Every kind of extent, read and written by pages alone; the judge is the same image read by QEMU's tools.
modprobe ext4 || true
# counts NAME: what went which way.
counts() { ringdisk ublk info 0 --json | sed "s/^/counts $1 /"; }
# written OFFSET KIB: the same bytes at the same place of the device and of the raw copy, by requests of that size.
written() {
    dd if=noise of=/dev/ublkb0 bs=$2k count=1 seek=$1 oflag=direct,seek_bytes status=none
    dd if=noise of=copy.raw bs=$2k count=1 seek=$1 oflag=seek_bytes conv=notrunc status=none
}
# read_back NAME SIZE…: all of the device, by requests of each size.
read_back() {
    name=$1
    shift
    for size; do
        dd if=/dev/ublkb0 bs=$size iflag=direct status=none >device.raw
        cmp device.raw copy.raw && echo "read $name $size"
    done
    rm device.raw
}
head -c 1M /dev/urandom >noise
# Data, text, zeros and holes in turn, of lengths that are no clusters.
: >source.raw
for turn in 1 2 3; do
    head -c 1300k /dev/urandom >>source.raw
    yes "text $turn" | head -c 2100k >>source.raw
    head -c 700k /dev/zero >>source.raw
    truncate -s $((turn * 7))M source.raw
done
truncate -s 24M source.raw
for kind in compressed zstd plain; do
    case $kind in
    compressed) qemu-img convert -c -O qcow2 source.raw base.qcow2 ;;
    zstd) qemu-img convert -c -O qcow2 -o compression_type=zstd source.raw base.qcow2 ;;
    plain) qemu-img convert -O qcow2 -o cluster_size=128k source.raw base.qcow2 ;;
    esac
    # The overlay is longer than what is behind it, which is no multiple of its clusters.
    qemu-img create -q -f qcow2 -F qcow2 -b base.qcow2 top.qcow2 26M
    cp source.raw copy.raw
    truncate -s 26M copy.raw
    add content add --disk path=top.qcow2,backing_files=on --transport zero-copy --json
    sed 's/^/made /' content.out
    read_back "$kind" 20k 1M
    for place in "0 4" "65536 64" "1300480 12" "4194304 1024" "9437696 36" "15728640 256" "25165824 128" "26214400 4"; do
        written $place
    done
    read_back "$kind" 4k 68k 1M
    counts $kind
    kill $server
    wait $server && echo "stopped $kind" || { cat content.err; exit 1; }
    check top.qcow2
    qemu-img compare -q -f raw -F qcow2 copy.raw top.qcow2 && echo "same $kind"
    rm top.qcow2 base.qcow2 copy.raw
done

# A read-only disk.
qemu-img convert -c -O qcow2 source.raw ro.qcow2
cp source.raw copy.raw
add content add --disk path=ro.qcow2,readonly=on --transport zero-copy
read_back read-only 4k 20k 68k
kill $server
wait $server
rm copy.raw ro.qcow2 source.raw

# Images on a disk, past the page cache: what is not aligned as that disk wants it goes through memory of ours.
for disk in path=/var/tmp/d.qcow2 path=/var/tmp/d.raw,image_type=raw; do
    case $disk in
    *raw) truncate -s 32M /var/tmp/d.raw ;;
    *) ringdisk image create /var/tmp/d.qcow2 32M >/dev/null ;;
    esac
    add content add --disk $disk,direct=on --transport zero-copy
    verify /dev/ublkb0 --bsrange=512-128k --blockalign=512 --size=8m
    counts direct
    kept /dev/ublkb0 kept.raw
    kill $server
    wait $server
    case $disk in
    *raw) image=/var/tmp/d.raw ;;
    *) image=/var/tmp/d.qcow2; check $image ;;
    esac
    same kept.raw $image direct
    rm $image
done

# By size, both ways on one device and within one file.
ringdisk image create q.qcow2 64M >/dev/null
add content add --disk path=q.qcow2,num_queues=2 --queues-per-worker 2 --zero-copy-from 64K --json
sed 's/^/made /' content.out
verify /dev/ublkb0 --numjobs=2 --cpus_allowed=0,1 --cpus_allowed_policy=split --offset_increment=24m
counts auto
ringdisk ublk info 0 | sed 's/^/info /'
kill $server
wait $server
check q.qcow2

# More tags than places: the driver says which requests have none.
for each in 1 2; do
    rm q.qcow2
    ringdisk image create q.qcow2 64M >/dev/null
    add content add --disk path=q.qcow2,num_queues=2,queue_size=16 --queues-per-worker $each --transport zero-copy \
        --registered-buffers 5
    verify /dev/ublkb0 --numjobs=2 --cpus_allowed=0,1 --cpus_allowed_policy=split --offset_increment=24m
    counts fallback-$each
    kept /dev/ublkb0 kept.raw
    kill $server
    wait $server && echo "stopped fallback"
    check q.qcow2
    same kept.raw q.qcow2 fallback
done

# A file system, by pages alone.
rm q.qcow2
ringdisk image create -o cluster_size=16k q.qcow2 300M >/dev/null
add content add --disk path=q.qcow2,num_queues=2 --transport zero-copy
mkfs.ext4 -q /dev/ublkb0
mount /dev/ublkb0 /run/mnt
verify_files /run/mnt --size=16m --bsrange=1k-64k --direct=0
rm /run/mnt/verified.0.0
fstrim /run/mnt
echo 3 >/proc/sys/vm/drop_caches
(cd / && md5sum /run/mnt/verified* >/tmp/sums)
umount /run/mnt
mount /dev/ublkb0 /run/mnt
(cd / && md5sum -c --quiet /tmp/sums) && echo "sums fine"
umount /run/mnt
counts mounted
ended deleted ringdisk ublk del 0
wait $server && echo "server 0"
check q.qcow2
