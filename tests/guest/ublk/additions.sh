# Devices that come to a running server, and go.
mkdir images
for name in a b c; do ringdisk image create images/$name.qcow2 64M >/dev/null; done
ringdisk image create outside.qcow2 64M >/dev/null
ln -s ../outside.qcow2 images/link.qcow2
ctl() { ringdisk ctl --socket control "$@"; }
# Of the threads that are there all the time, only the one for disks is not confined.
unconfined() {
    for status in /proc/$server/task/*/status; do
        grep -q '^Seccomp:.*0$' "$status" && sed -n 's/^Name:[[:space:]]*//p' "$status"
    done | tr '\n' ' ' || true
}
# The same command line, whatever became of the last server.
set -- add --images images --control control --or-recover
/mnt/ringdisk --log info ublk "$@" 2>first.err & server=$!
soon 60 [ -S control ]
ended none ctl disk-list
ended outside ctl disk-add --disk path=outside.qcow2
ended link ctl disk-add --disk path=images/link.qcow2
ended missing ctl disk-add --disk path=images/none.qcow2
ended socket ctl disk-add --disk path=images/a.qcow2 --listen s.sock
ended first ctl disk-add --disk path=images/a.qcow2,serial=DATA,num_queues=2
ended twice ctl disk-add --disk path=images/a.qcow2
echo "unconfined $(unconfined)"
echo "attached $(perl attach.pl control images/b.qcow2 10)"
mkfs.ext4 -q /dev/disk/by-id/ringdisk-DATA
mount /dev/disk/by-id/ringdisk-DATA /run/mnt
verify_files /run/mnt --size=16m --fsync=32 --time_based --runtime=8 & load=$!
# Beside a device with work.
ended second ctl disk-add --disk path=images/b.qcow2
dd if=/dev/ublkb1 of=/dev/null bs=4k count=1 iflag=direct status=none
ended used ctl disk-remove 0
ended unknown ctl disk-remove 7
ended removed ctl disk-remove 1
[ -e /dev/ublkb1 ] || echo "node gone"
ended free ringdisk io --disk path=images/b.qcow2 -c "write -P 1 0 64k"
ended again ctl disk-add --disk path=images/b.qcow2
# Whoever comes next has those that were added.
kill -9 $server
wait $server || true
add recovered "$@"
echo "recovered $(sort recovered.out | tr '\n' ' ')"
ended third ctl disk-add --disk path=images/c.qcow2
old=$server
add next upgrade --all --images images --control control
wait $old
echo "upgraded $(sort next.out | tr '\n' ' ')"
wait $load
echo "load 0"
umount /run/mnt
for id in 2 1 0; do ended "left $id" ctl disk-remove $id; done
ended empty ctl disk-list
# One without devices leaves, too.
old=$server
/mnt/ringdisk ublk upgrade --server $old --images images --control control 2>bare.err & server=$!
wait $old && echo "bare 0"
soon 60 [ -S control ]
ended anew ctl disk-add --disk path=images/a.qcow2
ended withdrawn ctl disk-remove 0
[ -L /dev/disk/by-id/ringdisk-DATA ] || echo "by-id gone"
kill $server
wait $server && echo "server 0"
# Its server was killed while it was written to.
sound images/a.qcow2
for name in b c; do check images/$name.qcow2; done

# In a sandbox without folders nothing comes or goes; without the sandbox anything does, and the server ends with its last device.
add plain add --disk path=images/a.qcow2 --control control
ended refused ctl disk-add --disk path=images/b.qcow2
ended kept ctl disk-remove 0
# The folder that the next server is started in need not be there.
old=$server
mkdir gone
cd gone
rmdir ../gone
add /tmp/work/deleted upgrade --all
cd /tmp/work
wait $old
echo "nowhere $(cat deleted.out)"
kill $server
wait $server
add open add --disk path=images/a.qcow2 --control control --sandbox off
ended any ctl disk-add --disk path=outside.qcow2
for id in 0 1; do ended "last $id" ctl disk-remove $id; done
wait $server && echo "ended 0"
check outside.qcow2
