# Servers that are killed under load, and others that go on with their devices.
for transport in $own_transports; do
    rm -f q.qcow2
    ringdisk image create -o cluster_size=16k q.qcow2 160M >/dev/null
    add first add --disk path=q.qcow2,num_queues=2 --transport $transport
    mkfs.ext4 -q -b 4096 /dev/ublkb0
    mount /dev/ublkb0 /run/mnt
    verify_files /run/mnt --size=48m --fsync=32 --time_based --runtime=9 & load=$!
    for round in 1 2 3; do
        sleep 1.$round
        kill -9 $server
        wait $server || true
        case $round in
        1) ended unknown ringdisk ublk recover 9 ;;
        2) ended wrong ringdisk ublk recover 0 --disk path=r.raw,image_type=raw ;;
        esac
        began=$(date +%s%N)
        add again recover 0
        echo "recovered $transport $round after $((($(date +%s%N) - began) / 1000000)) ms: $(cat again.out)"
        ended living ringdisk ublk recover 0
    done
    wait $load
    echo "load $transport 0"
    dd if=/dev/urandom of=/run/mnt/kept bs=1M count=8 status=none
    (cd / && md5sum /run/mnt/kept /run/mnt/verified* >/tmp/sums)
    # Killed with what the host believes written in its own memory only.
    kill -9 $server
    wait $server || true
    add again recover --all
    (cd / && md5sum -c --quiet /tmp/sums) && echo "sums $transport fine"
    umount /run/mnt
    e2fsck -fn /dev/ublkb0 >/tmp/fsck 2>&1 || { cat /tmp/fsck; exit 1; }
    kept /dev/ublkb0 kept.raw
    ringdisk ublk info 0 --json | sed "s/^/info $transport /"
    ended deleted ringdisk ublk del 0
    wait $server && echo "server $transport 0"
    sound q.qcow2
    same kept.raw q.qcow2 $transport
done

# A device that is not to outlive its server goes with it; one that is and was forgotten can be deleted.
add off add --disk path=q.qcow2 --recovery off
kill -9 $server
wait $server || true
soon 60 [ ! -e /dev/ublkb0 ]
ringdisk ublk list | sed 's/^/off /'
ended swept ringdisk ublk del --all
add on add --disk path=q.qcow2
kill -9 $server
wait $server || true
sleep 1
ended orphan ringdisk ublk del 0
ringdisk ublk list | wc -l | sed 's/^/left /'
sound q.qcow2
