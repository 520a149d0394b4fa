# Who may write the image of a device that waits for a server.
ringdisk image create base.qcow2 64M >/dev/null
qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 data.qcow2
ringdisk image create other.qcow2 64M >/dev/null
add first add --disk path=data.qcow2,backing_files=on
mkfs.ext4 -q /dev/ublkb0
mount /dev/ublkb0 /run/mnt
dd if=/dev/urandom of=/run/mnt/before bs=1M count=4 status=none
ended served ringdisk ublk add --disk path=data.qcow2,backing_files=on
kill -9 $server
# At once, as an operator does, and when the driver has noticed.
ended again ringdisk ublk add --disk path=data.qcow2,backing_files=on --daemonize
wait $server || true
ln data.qcow2 link.qcow2
ended link ringdisk ublk add --disk path=/tmp/work/link.qcow2,backing_files=on --daemonize
ended vhost-user timeout 20 /mnt/ringdisk vhost-user --socket s.sock --disk path=data.qcow2,backing_files=on
# Also from inside a sandbox.
/mnt/ringdisk vhost-user --images . --control v.control 2>v.err & vhost=$!
soon 60 [ -S v.control ]
ended later ringdisk ctl --socket v.control disk-add --disk path=data.qcow2,backing_files=on --listen s.sock
kill $vhost
wait $vhost
ended io ringdisk io --disk path=data.qcow2,backing_files=on -c "write -P 1 0 64k"
ended base ringdisk io --disk path=base.qcow2 -c "write -P 1 0 64k"
ended repair ringdisk image check --repair all data.qcow2
ended read ringdisk io --disk path=data.qcow2,backing_files=on,readonly=on -c "read 0 64k"
ringdisk ublk list | wc -l | sed 's/^/devices /'
add again recover 0
dd if=/dev/urandom of=/run/mnt/after bs=1M count=4 status=none
umount /run/mnt
e2fsck -fn /dev/ublkb0 >/tmp/fsck 2>&1 || { cat /tmp/fsck; exit 1; }
echo "fsck 0"

# What is remembered of a device that is gone, whatever has its number now.
cp /run/ringdisk/ublk/0.json stale.json
kill $server
wait $server && echo "server 0"
cp stale.json /run/ringdisk/ublk/0.json
ended gone ringdisk io --disk path=data.qcow2,backing_files=on -c "write -P 1 0 64k"
add other add --disk path=other.qcow2 --id 0
cp stale.json /run/ringdisk/ublk/0.json
ended taken ringdisk io --disk path=data.qcow2,backing_files=on -c "write -P 1 0 64k"
kill $server
wait $server || true
# A device that is given up.
add given add --disk path=data.qcow2,backing_files=on --id 0
kill -9 $server
wait $server || true
ended waits ringdisk io --disk path=data.qcow2,backing_files=on -c "write -P 1 0 64k"
ended deleted ringdisk ublk del 0
ended free ringdisk io --disk path=data.qcow2,backing_files=on -c "write -P 1 0 64k"
sound data.qcow2

# A signal is heard while the lock of an image is waited for.
add late add --disk path=data.qcow2,backing_files=on --id 0
kill -9 $server
wait $server || true
sleep 60 | qemu-io -f qcow2 data.qcow2 >/dev/null 2>&1 & holder=$!
sleep 3
/mnt/ringdisk ublk recover 0 >late.out 2>late.err & server=$!
sleep 3
began=$(date +%s)
kill $server
status=0
wait $server || status=$?
echo "late $status $(($(date +%s) - began < 10)) $(cat late.err)"
kill $holder
