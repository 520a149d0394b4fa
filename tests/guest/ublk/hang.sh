# A command that the kernel holds, because a server does not answer.
ringdisk image create q.qcow2 64M >/dev/null
add hung add --disk path=q.qcow2
kill -STOP $server
dd if=/dev/ublkb0 of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null & reader=$!
sleep 1
began=$(now)
(ended del ringdisk ublk del 0 --force) & del=$!
sleep 15
(ended list ringdisk ublk list) & list=$!
wait $list
wait $del
echo "ended after $(($(now) - began)) ms"
# What carried the commands out goes when the kernel lets it, and so does the device.
kill -CONT $server
wait $reader || true
wait $server && echo "server 0"
soon 10 [ ! -e /dev/ublkc0 ] || true
ringdisk ublk del --all
ringdisk ublk list | wc -l | sed 's/^/left /'
add after add --disk path=q.qcow2
kill $server
wait $server && echo "after 0"
check q.qcow2
