# Devices of each transport and format: written, verified, trimmed, stopped, and read by QEMU.
ringdisk ublk features | tr '\n' ' ' | sed 's/^/features /'
echo
# Not in memory, as the images of the other tests are.
mkdir -p /var/work
cd /var/work
ringdisk image create q.qcow2 64M >/dev/null
truncate -s 64M r.raw
# Each transport of this kernel, and each format by each transport, on one kernel or the other.
case $own_transports in
zero-copy) pairs="copy:raw user-copy:qcow2 zero-copy:qcow2 zero-copy:raw" ;;
*) pairs="copy:qcow2 user-copy:raw" ;;
esac
for pair in $pairs; do
    transport=${pair%:*}
    case $pair in
    *raw) image=r.raw disk=path=r.raw,image_type=raw ;;
    *) image=q.qcow2 disk=path=q.qcow2 ;;
    esac
    add work add --disk $disk,num_queues=2 --transport $transport --json
    sed 's/^/made /' work.out
    dev=/dev/ublkb0
    verify $dev --numjobs=2 --cpus_allowed=0,1 --cpus_allowed_policy=split --offset_increment=24m
    ringdisk ublk info 0 --json | sed "s/^/info $transport /"
    # Zeroes that may be holes and zeroes that may not, discards, and writes that are durable by themselves.
    head -c 3M /dev/urandom >data
    dd if=data of=$dev bs=1M oflag=direct,dsync status=none
    blkdiscard -o 512k -l 256k $dev
    blkdiscard -z -o 1M -l 1000k $dev
    fallocate -p -o 2200k -l 16k $dev
    dd if=/dev/zero of=data bs=1k seek=1024 count=1000 conv=notrunc status=none
    dd if=/dev/zero of=data bs=1k seek=2200 count=16 conv=notrunc status=none
    for part in "0 2" "3 1" "4 8"; do
        set -- $part
        dd if=$dev bs=256k skip=$1 count=$2 status=none >one
        dd if=data bs=256k skip=$1 count=$2 status=none >other
        cmp one other
    done
    kept $dev kept.raw
    kill $server
    wait $server && echo "stopped $transport $disk" || { cat work.err; exit 1; }
    test ! -e $dev
    [ $image = r.raw ] || check $image
    same kept.raw $image "$transport $disk"
done
