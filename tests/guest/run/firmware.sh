# A machine with a kernel that firmware finds on a disk.
timeout 300 ./ringdisk --log info run --firmware CLOUDHV.fd --cpus 1 --memory 512M --serial file=firmware.log \
    --disk path=root.qcow2,backing_files=on --disk path=boot.raw,image_type=raw 2>firmware.err && echo "ended 0" || echo "ended $?"
told firmware
