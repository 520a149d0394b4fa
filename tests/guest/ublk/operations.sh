# Names that stay, a command line that goes on where a killed server was, and limits that devices share.
for name in a b c d; do ringdisk image create $name.qcow2 256M >/dev/null; done
links() {
    for link in /dev/disk/by-id/*; do
        [ ! -L "$link" ] || echo "link $1 $(basename "$link") $(readlink "$link")"
    done
}

add links add --disk path=a.qcow2,serial=DATA "path=b.qcow2,serial=x y/z" path=c.qcow2
first=$server
links all
# In 1/100 s of a CPU.
io_wait() { awk '$1 == "cpu" { print $6 }' /proc/stat; }
sleep 1
idle=$(io_wait)
sleep 2
echo "io_wait $(($(io_wait) - idle))"
add other add --disk path=d.qcow2,serial=DATA
grep -o 'ublkb3 has no link.*' other.err | sed 's/^/told /'
kill $server
wait $server
kill -9 $first
wait $first || true
rm /dev/disk/by-id/*y*
add links recover --all
links again
ended deleted ringdisk ublk del 0
links fewer
kill $server
wait $server
links none

# The same command line, whatever became of the last server.
serve_same() { add same add --or-recover --id 7 --disk path=a.qcow2,num_queues=2,serial=DATA path=b.qcow2; }
serve_same
ended served ringdisk ublk add --or-recover --id 7 --disk path=a.qcow2,num_queues=2,serial=DATA
mkfs.ext4 -q /dev/disk/by-id/ringdisk-DATA
mount /dev/disk/by-id/ringdisk-DATA /run/mnt
verify_files /run/mnt --size=24m --fsync=32 --time_based --runtime=10 & load=$!
for round in 1 2 3; do
    sleep 2
    kill -9 $server
    [ $round != 3 ] || ended another ringdisk ublk add --or-recover --id 7 --disk path=d.qcow2
    # As a service manager does it: at once.
    serve_same
    echo "again $(tr '\n' ' ' <same.out)"
done
wait $load
echo "load 0"
links after
umount /run/mnt
e2fsck -fn /dev/ublkb7 >/tmp/fsck 2>&1 || { cat /tmp/fsck; exit 1; }
kill $server
wait $server && echo "server 0"
sound a.qcow2
# A device that went with its server leaves its number behind.
add gone add --or-recover --id 7 --disk path=a.qcow2 --recovery off
kill -9 $server
wait $server || true
soon 60 [ ! -e /dev/ublkb7 ]
ringdisk ublk list | sed 's/^/before /'
add gone add --or-recover --id 7 --disk path=a.qcow2 --recovery off
ringdisk ublk list | sed 's/^/after /'
kill $server
wait $server && echo "gone 0"

# What a server has counted beside what fio has; its successor has the same address.
cat >scrape.pl <<'END'
use IO::Socket::UNIX;
my $server = IO::Socket::UNIX->new(Peer => $ARGV[0]) or die $!;
print $server "GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n";
$server->flush;
print while <$server>;
END
# count NAME KIND: the sum of all queues.
count() {
    perl scrape.pl /tmp/metrics | tr -d '\r' |
        awk -v name="ringdisk_$1{" -v kind="kind=\"$2\"" 'index($0, name) == 1 && index($0, kind) { sum += $NF } END { print sum + 0 }'
}
counted() {
    before="$(count requests_total read) $(count request_bytes_total read) $(count requests_total write)"
    fio --name=count --filename=/dev/ublkb0 --size=128m --rw=randrw --rwmixread=75 --bs=4k --number_ios=2000 --ioengine=libaio \
        --iodepth=16 --direct=1 --allow_file_create=0 --eta=never --output-format=terse --output=/tmp/terse
    after="$(count requests_total read) $(count request_bytes_total read) $(count requests_total write)"
    # Reads by fio: KiB in field 6; writes in field 47.
    echo "$before $after $(awk -F ';' '{ print $6 / 4, $47 / 4 }' /tmp/terse)" |
        awk -v name=$1 '{ print "counted", name, $4 - $1, ($5 - $2) / 4096, $6 - $3, "fio", $7, $8 }'
    echo "errors $1 $(count request_errors_total read)"
}
ctl() { ringdisk ctl --socket /tmp/control "$@"; }
add first add --disk path=c.qcow2,num_queues=2 --metrics unix:/tmp/metrics --control /tmp/control
counted first
ended "ctl listed" ctl disk-list
ended "ctl flushed" ctl flush 0
ended "ctl made" ctl snapshot-create 0 one
ended "ctl deleted" ctl snapshot-delete 0 one
ended "ctl refused" ctl pause
ended "ctl compacted" ctl compact 0 --rate 4M
ended "metrics taken" ringdisk ublk add --disk path=d.qcow2 --metrics unix:/tmp/metrics
old=$server
add next upgrade --all --metrics unix:/tmp/metrics --control /tmp/control
wait $old && echo "ctl left"
answers() { perl scrape.pl /tmp/metrics >/dev/null 2>&1; }
soon 60 answers
counted next
ended "ctl again" ctl compact 0
compacted() { ctl compact-status 0 | grep -q 'state *done'; }
soon 60 compacted || ctl compact-status 0
ended "ctl counted" ctl stats 0
ended "ctl stopped" ctl stop
wait $server && echo "counted 0"
check c.qcow2

# Two devices, one limit.
now() { awk '{ print $1 }' /proc/uptime; }
sectors() { cat /sys/block/ublkb0/stat /sys/block/ublkb1/stat | awk '{ sum += $3 } END { print sum }'; }
# rate NAME: MiB in a second, of both together, over 5 s.
rate() {
    for dev in /dev/ublkb0 /dev/ublkb1; do
        fio --name=read --filename=$dev --size=200m --rw=randread --bs=64k --ioengine=libaio --iodepth=8 --direct=1 \
            --time_based --runtime=8 --allow_file_create=0 --eta=never --output=/tmp/fio.$(basename $dev) &
        eval "load_$(basename $dev)=$!"
    done
    sleep 2
    began=$(now)
    from=$(sectors)
    sleep 5
    echo "$began $(now) $from $(sectors)" | awk -v name=$1 '{ printf "rate %s %.2f\n", name, ($4 - $3) / 2048 / ($2 - $1) }'
    wait $load_ublkb0 $load_ublkb1
}
slow=id=slow,bw_size=800K,bw_refill_time=100
ended unknown ringdisk ublk add --disk path=c.qcow2,rate_limit_group=fast --rate-limit-group $slow
add shared add --disk path=c.qcow2,rate_limit_group=slow path=d.qcow2,rate_limit_group=slow --rate-limit-group $slow
rate together
kill -9 $server
wait $server || true
add shared recover --all
rate recovered
kill $server
wait $server && echo "shared 0"
