# A server that may open only so many files comes to an end at another step with each number: in the end, none has been
# spared.
head -c 64k /dev/urandom >data
for transport in $own_transports; do
    ringdisk image create a.qcow2 48M >/dev/null
    add first add --id 0 --disk path=a.qcow2,num_queues=2 --transport $transport
    dd if=data of=/dev/ublkb0 bs=64k seek=5 oflag=direct status=none
    kill -9 $server
    wait $server || true
    dd if=/dev/ublkb0 of=found bs=64k skip=5 count=1 iflag=direct status=none & reader=$!
    : >failures
    files=6
    while [ $files -lt 60 ]; do
        files=$((files + 1))
        status=0
        (
            ulimit -n $files
            exec timeout 60 /mnt/ringdisk ublk recover 0 --daemonize
        ) >/dev/null 2>failure || status=$?
        [ $status != 0 ] || break
        sed 's/^/  /' failure
        cat failure >>failures
    done
    echo "files $transport $files"
    echo "half $transport $(grep -c 'queue 1' failures)"
    wait $reader
    cmp data found && echo "recovered $transport"
    ended removed ringdisk ublk del 0
    sound a.qcow2
done
