# Machines of $whom take turns, in $rounds; the order is turned round each time. A machine's first disk is its root, the second
# one `/dev/lab/data`.
mount -t debugfs none /sys/kernel/debug 2>/dev/null || true
mount /dev/lab/tools /mnt
cd /mnt
line="console=ttyS0 loglevel=4 panic=1 lab.root=0000:00:01.0 lab.disk=data@0000:00:02.0"
./ringdisk image create data.qcow2 256M >/dev/null
for part in 0 64 128 192; do
    ./ringdisk io --disk path=data.qcow2 -c "write -P 1 ${part}M 64M" >/dev/null
done
for who in $whom; do
    ./ringdisk image create -o backing_file=/dev/lab/base,backing_fmt=raw root-$who.qcow2 >/dev/null
done
# machine WHO SCRIPT: becomes the machine.
machine() {
    case $1 in
    ringdisk)
        exec ./ringdisk --log info run --kernel vmlinuz --initramfs "$2" --cpus 2 --memory 512M --serial "file=console" \
            --cmdline "$line" --disk path=root-ringdisk.qcow2,backing_files=on,direct=on --disk path=data.qcow2,direct=on ;;
    qemu)
        how=cache=none,aio=io_uring,discard=unmap,format=qcow2
        exec ./qemu -L . -nodefaults -no-user-config -display none -machine q35,accel=kvm,memory-backend=mem -cpu host -smp 2 \
            -m 512M -object memory-backend-memfd,id=mem,size=512M,share=on -object iothread,id=io \
            -kernel vmlinuz -initrd "$2" -append "$line" -serial "file:console" \
            -drive if=none,id=root,file=root-qemu.qcow2,$how -device virtio-blk-pci,drive=root,addr=1,iothread=io \
            -drive if=none,id=data,file=data.qcow2,$how -device virtio-blk-pci,drive=data,addr=2,iothread=io ;;
    cloud-hypervisor)
        exec ./cloud-hypervisor --kernel vmlinuz --initramfs "$2" --cpus boot=2 --memory size=512M,shared=on \
            --serial "file=console" --console off --cmdline "$line" \
            --disk path=root-cloud-hypervisor.qcow2,direct=on,backing_files=on,image_type=qcow2 \
            path=data.qcow2,direct=on,image_type=qcow2 ;;
    esac
}
# turn WHO SCRIPT: runs the machine, and tells how long that took in all.
turn() {
    rm -f console
    # What the last one left to be written is not this one's.
    sync
    begin=$(date +%s%N)
    (machine "$1" "$2") >said 2>&1 & pid=$!
    [ "$2" = boot ] || watch $pid
    wait $pid || { echo "$1 ended with $?"; tail -n 20 said console; exit 1; }
    end=$(date +%s%N)
    grep -q '@@exit 0' console || { echo "the guest of $1 failed"; tail -n 30 console said; exit 1; }
    echo "@ $1 $2-ms $(((end - begin) / 1000000))"
    tr -d '\r' <console | sed -n "s/^figure /@ $1 /p"
}
# Tells of a machine what it holds besides the guest's memory, and how often the guest left for it during the I/O.
watch() {
    first= last= most=0
    while [ -e "/proc/$1/exe" ]; do
        kib=$(awk '/RssAnon|RssFile/ { sum += $2 } END { print sum + 0 }' /proc/$1/status 2>/dev/null || echo 0)
        [ "$kib" -le "$most" ] || most=$kib
        exits=$(cat /sys/kernel/debug/kvm/$1-*/mmio_exits 2>/dev/null || true)
        if grep -q begun console 2>/dev/null && ! grep -q ended console && [ -n "$exits" ]; then
            first=${first:-$exits}
            last=$exits
        fi
        sleep 0.5
    done
    echo "@ $who resident-kib $most"
    [ -z "$last" ] || echo "@ $who exits $((last - first))"
}
for script in boot work; do
    for round in $(seq $rounds); do
        for who in $whom; do turn $who $script; done
        whom=$(for who in $whom; do echo $who; done | tac | tr '\n' ' ')
    done
done
./ringdisk image check data.qcow2
