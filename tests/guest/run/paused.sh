# A machine whose disk gets snapshots under load, that is paused, and whose disk grows while it runs.
modprobe -a tun vhost_net
# shellcheck disable=SC2086 # a list
printf '#cloud-config\nhostname: paused\n' >user-data
run count --control control --cloud-init user-data $NETWORK & machine=$!
connect
# wrote WHEN: says the guest's last count of which the whole line has come from its serial port. `read` leaves out the beginning of a line.
wrote() { while read -r line; do echo "$1 $line"; done <count.log | tr -d '\r' | grep ' wrote [0-9]*$' | tail -n 1; }
heard() { busybox ping -c 1 -W 1 192.0.2.2 >/dev/null; }
wait_for count "wrote 20"
ctl info | sed 's/^/before /'
soon 20 heard && echo "heard before"
ctl snapshot-create data.qcow2 gone | sed 's/^/first /'
wrote live
ctl snapshot-create data.qcow2 live | sed 's/^/second /'
ctl snapshot-delete data.qcow2 name=gone | sed 's/^/deleted /'
ctl snapshot-list data.qcow2 | sed 's/^/listed /'
refused taken snapshot-create data.qcow2 live
refused unforced snapshot-apply data.qcow2 live
ctl pause >/dev/null
wrote last
ctl info | sed 's/^/paused /'
heard || echo "silent paused"
cp data.qcow2 copy.qcow2
sleep 2
cmp data.qcow2 copy.qcow2 && echo "still yes"
ctl resume >/dev/null
soon 20 heard && echo "heard again"
ctl dance 2>&1 | head -n 1 | sed 's/^/unknown /' || true
refused nodisk disk-resize nodisk 1G
refused smaller disk-resize data.qcow2 1M
ctl disk-resize data.qcow2 256M | sed 's/^/grown /'
wait_for count "waits for the button"
ctl power-button | sed 's/^/pressed /'
wait $machine && echo "ended 0" || echo "ended $?"
told count
