# A machine with three disks works, restarts, works again and ends. With `served=yes` another program serves the second, is killed
# and followed by another while the machine works.
serve_data() { serve data.sock --restartable --disk path=data.qcow2,num_queues=2,serial=DATA; }
./ringdisk image create frozen.qcow2 16M >/dev/null
./ringdisk io --disk path=frozen.qcow2 -c "write -P 7 0 1M" >/dev/null
if [ "$served" = yes ]; then
    serve_data
    data=vhost_user=on,socket=data.sock,num_queues=2
fi
run work --disk path=frozen.qcow2,readonly=on & machine=$!
if [ "$served" = yes ]; then
    wait_for work ready
    for kill in 1 2 3; do
        sleep 1
        kill -9 $server
        wait $server || true
        serve_data
    done
fi
wait $machine && echo "ended 0" || echo "ended $?"
[ "$served" = no ] || stopped
told work
