# A disk that another process serves comes to a running machine, goes, and comes again.
./ringdisk image create other.qcow2 16M >/dev/null
data=path=other.qcow2
run far --control control & machine=$!
wait_for far "say ready"
# Nobody is there yet: it is refused, and nothing is left behind.
refused nobody disk-add --disk vhost_user=on,socket=far.sock,id=far
serve far.sock --disk path=data.qcow2,num_queues=2,serial=FAR
ctl disk-add --disk vhost_user=on,socket=far.sock,id=far,num_queues=2 | sed 's/^/added /'
refused twice disk-add --disk vhost_user=on,socket=far.sock,id=far
ctl info | sed 's/^/with /'
wait_for far "say unmounted"
ctl disk-remove far | sed 's/^/removed /'
wait_for far "say gone"
ctl info | sed 's/^/without /'
# The server was let go, and serves whoever comes next.
ctl disk-add --disk vhost_user=on,socket=far.sock,id=far,num_queues=2 | sed 's/^/added /'
wait $machine && echo "ended 0" || echo "ended $?"
stopped
told far
