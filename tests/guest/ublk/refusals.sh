# What keeps a server from being replaced, found before it is asked; and what does not.
for name in a b; do ringdisk image create $name.qcow2 64M >/dev/null; done
ended nothing ringdisk ublk upgrade 7
ended none ringdisk ublk upgrade --all
add one add --disk path=a.qcow2,num_queues=2 path=b.qcow2 --id 0 --queues-per-worker 2
one=$server
ended part ringdisk ublk upgrade 0
works 0 $one
mv b.qcow2 aside
ended missing ringdisk ublk upgrade 0 1
head -c 100 aside >b.qcow2
ended broken ringdisk ublk upgrade --all
mv aside b.qcow2
works 1 $one
kill -STOP $one
ended silent ringdisk ublk upgrade 0 1
kill -CONT $one
works 0 $one
mv /run/ringdisk/ublk/1.json aside
ended forgotten ringdisk ublk upgrade 0 1
mv aside /run/ringdisk/ublk/1.json
works 1 $one

# Into the background, from another folder.
(cd / && ringdisk ublk upgrade --all --daemonize) | tr '\n' ' ' | sed 's/^/background /'
echo
wait $one && echo "one 0"
two=$(ringdisk ublk info 0 --json | sed 's/.*"pid":\([0-9]*\).*/\1/')
works 0 $two
works 1 $two
ringdisk ublk info 0 --json | grep -o '"workers":[0-9]*' | sed 's/^/threads /'
# Nobody serves it any more.
kill -9 $two
while [ -d /proc/$two ]; do sleep 0.05; done
ended unserved ringdisk ublk upgrade 0 1
add three recover --all
works 0 $server
works 1 $server
ended deleted ringdisk ublk del --all
wait $server && echo "three 0"
check a.qcow2
check b.qcow2
