# Disks of other kinds of images on block devices, whose server is killed, recovered and replaced while they are written; then some
# become smaller and larger. QEMU reads from each what the device reads as.
printf %s 'correct horse battery staple' >secret
ringdisk image create -o encrypt.format=luks,encrypt.iter-time=10 --secret-file secret locked.qcow2 64M >/dev/null
ringdisk image create -o data_file=outside.raw,data_file_raw=on outside.qcow2 64M >/dev/null
ringdisk image create -o data_file=apart.data,cluster_size=16k apart.qcow2 64M >/dev/null
head -c 6M /dev/urandom >below.raw
ringdisk image create -o extended_l2=on,backing_file=below.raw,backing_fmt=raw parts.qcow2 64M >/dev/null
set -- path=locked.qcow2,secret_file=secret path=outside.qcow2,data_file=on path=apart.qcow2,data_file=on \
    path=parts.qcow2,backing_files=on
add formats add --transport $own_transport --disk "$@" --json
sed 's/^/made /' formats.out
loads=
for device in 0 1 2 3; do
    fio --name=load --filename=/dev/ublkb$device --size=24m --rw=randrw --bsrange=4k-64k --ioengine=libaio --iodepth=8 --direct=1 \
        --verify=xxhash --verify_fatal=1 --verify_backlog=64 --verify_dump=0 --randseed=$device --time_based --runtime=25 \
        --allow_file_create=0 --eta=never --output=/tmp/load.$device & loads="$loads $!"
done
for round in 1 2; do
    sleep 4
    kill -9 $server
    wait $server || true
    add formats recover --all
    echo "recovered $(tr '\n' ' ' <formats.out)"
    sleep 3
    old=$server
    add formats upgrade --all
    wait $old && echo "replaced $(tr '\n' ' ' <formats.out)"
done
device=0
for load in $loads; do
    wait $load && echo "worked $device" || cat /tmp/load.$device
    device=$((device + 1))
done

# What lies past the new end is gone, also from a raw data file, when the disk is as large as before.
resized="0 1 2 3"
ringdisk ublk features | grep -q UPDATE_SIZE || resized=
for device in $resized; do
    dd if=/dev/urandom of=/dev/ublkb$device bs=1M seek=40 count=8 oflag=direct status=none
    ended "refused $device" ringdisk ublk set-size $device 44M
    ended "smaller $device" ringdisk ublk set-size $device 44M --force
    ended "larger $device" ringdisk ublk set-size $device 64M
    dd if=/dev/ublkb$device bs=1M skip=44 iflag=direct status=none | cmp -n 20971520 - /dev/zero && echo "zeros $device"
    verify /dev/ublkb$device --offset=42m --size=4m
done
for device in 0 1 2 3; do kept /dev/ublkb$device kept.$device; done
kill $server
wait $server && echo "server 0"
# QEMU opens an encrypted image with a secret only.
by_qemu() {
    qemu-img "$1" --object secret,id=key,file=secret --image-opts $2 \
        driver=qcow2,file.driver=file,file.filename=locked.qcow2,encrypt.format=luks,encrypt.key-secret=key
}
by_qemu check "" >/tmp/check 2>&1 || [ $? = 3 ] || cat /tmp/check
by_qemu compare driver=raw,file.driver=file,file.filename=kept.0 && echo "same locked"
for image in outside apart parts; do sound $image.qcow2; done
cmp kept.1 outside.raw && echo "same raw"
same kept.1 outside.qcow2 outside
same kept.2 apart.qcow2 apart
same kept.3 parts.qcow2 parts
