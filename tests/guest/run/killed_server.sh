# A machine goes on while the server of its disk is killed and followed by another.
serve_data() { serve data.sock --restartable --disk path=data.qcow2,num_queues=2; }
serve_data
./ringdisk image create frozen.qcow2 16M >/dev/null
data=vhost_user=on,socket=data.sock,num_queues=2
run verify --disk path=frozen.qcow2,readonly=on & machine=$!
wait_for verify ready
for kill in 1 2 3; do
    sleep 1
    kill -9 $server
    wait $server || true
    serve_data
done
wait $machine && echo "ended 0" || echo "ended $?"
stopped
told verify
