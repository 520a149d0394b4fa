# A machine with three disks works, restarts, works again and ends. With `served=yes` another program serves the second, is killed
# and followed by another while the machine works. Otherwise it has a network, too, by which bytes come and go.
serve_data() { serve data.sock --restartable --disk path=data.qcow2,num_queues=2,serial=DATA; }
./ringdisk image create frozen.qcow2 16M >/dev/null
./ringdisk io --disk path=frozen.qcow2 -c "write -P 7 0 1M" >/dev/null
if [ "$served" = yes ]; then
    serve_data
    data=vhost_user=on,socket=data.sock,num_queues=2
fi
network=
if [ "$served" = no ]; then
    modprobe -a tun vhost_net
    network=$NETWORK
fi
# shellcheck disable=SC2086 # a list
run work --disk path=frozen.qcow2,readonly=on $network & machine=$!
if [ "$served" = no ]; then
    connect
    mkdir www
    head -c 4M /dev/urandom >www/bytes
    sha256sum <www/bytes | sed 's/^/offered /'
    busybox httpd -f -p 192.0.2.1:80 -h www & web=$!
    # With nothing to say, but no end of it: at an end of what comes back the sender would not send the rest.
    mkfifo held
    exec 3<>held
    busybox nc -l -p 9000 <&3 >came & listener=$!
fi
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
if [ "$served" = no ]; then
    kill $web
    wait $listener
    sha256sum <came | sed 's/^/came /'
    [ -e /sys/class/net/tap0 ] || echo "gone tap0"
else
    stopped
fi
told work
