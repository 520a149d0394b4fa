# A machine with three disks works, restarts, works again and ends. With `served=yes` another program serves the second.
if [ "$served" = yes ]; then
    serve data.sock --disk path=data.qcow2,num_queues=2,serial=DATA
    data=vhost_user=on,socket=data.sock,num_queues=2
fi
./ringdisk image create frozen.qcow2 16M >/dev/null
./ringdisk io --disk path=frozen.qcow2 -c "write -P 7 0 1M" >/dev/null
run work --disk path=frozen.qcow2,readonly=on && echo "ended 0" || echo "ended $?"
told work
[ "$served" = no ] || stopped
