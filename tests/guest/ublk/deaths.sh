# Hand-overs of the servers of servers.sh that do not go as they should.
# What is under way takes long, and of three servers one dies meanwhile.
# letters LETTER: 64 KiB of it, in a file of this name.
letters() { head -c 64k /dev/zero | tr '\0' $1 >$1; }
letters A
letters B
letters C
put() { dd if=$1 of=/dev/ublkb3 bs=64k seek=500 count=1 oflag=direct status=none; }
holds() { dd if=/dev/ublkb3 bs=64k skip=500 count=1 iflag=direct status=none | cmp - $1 && echo "holds $1 $2"; }
fsfreeze -f /run/slow
put A & writer=$!
sleep 1
/mnt/ringdisk --log info ublk upgrade --all >slow.out 2>slow.err & slow=$!
wait $a && echo "slow left"
early=0
for step in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    # One descriptor for each image came with its lock. Whoever opens one has more.
    [ $(ls -l /proc/$slow/fd | grep -c /run/slow) -le 3 ] || early=1
    [ $step != 10 ] || kill -9 $c
    sleep 0.1
done
wait $c || true
echo "early $early"
alive $b && alive $slow && [ -d /proc/$writer ] && [ "$(pid_of 3)" = $b ] && echo "slow waits"
fsfreeze -u /run/slow
wait $writer && echo "slow written"
wait $b && echo "slow left"
up slow $slow
holds A slow
put B
sleep 1
holds B slow
if [ "$(pid_of 6)" = $slow ] && [ "$(state_of 6)" = live ]; then
    echo "lost taken"
else
    grep -q 'continues without' slow.err && echo "lost refused"
    last=$server
    add last recover 6 7 8
    kill -9 $last $server
    wait $last || true
    wait $server || true
    add all recover --all
fi
served all $server
loaded

# A server that is killed with writes under way: its successor waits for them.
fsfreeze -f /run/slow
put C & writer=$!
sleep 1
kill -9 $server
/mnt/ringdisk --log info ublk recover --all >killed.out 2>killed.err & killed=$!
sleep 3
! [ -s killed.out ] && alive $killed && echo "killed waits"
fsfreeze -u /run/slow
wait $server || true
up killed $killed
wait $writer && echo "killed written"
holds C killed
served killed $server
loaded

# Successors that die soon after the old server has left, whatever they are about: each kernel has moments of its own.
moments="000 060 300"
[ "$own_transports" != zero-copy ] || moments="020 150"
for ms in $moments; do
    old=$server
    /mnt/ringdisk --log info ublk upgrade --all >dead.out 2>dead.err & dead=$!
    wait $old && echo "left"
    sleep 0.$ms
    kill -9 $dead
    wait $dead || true
    ringdisk ublk list | awk '{ print $2 }' | sort | uniq -c | tr -s ' \n' ' ' | sed "s/^/after $ms /"
    echo
    add again recover --all
    served $ms $server
    loaded
done

# A server that hands over in another way; one that is asked in another way goes on.
cat >other.pl <<'END'
use IO::Socket::UNIX;
my ($path, $answer, $left) = @ARGV;
my $socket = IO::Socket::UNIX->new(Local => $path, Listen => 5) or die $!;
while (my $client = $socket->accept) {
    while (<$client>) { print $client /hand-over/ ? $left : $answer, "\n"; $client->flush }
}
END
cat >ask.pl <<'END'
use IO::Socket::UNIX;
my ($path, $request) = @ARGV;
my $server = IO::Socket::UNIX->new(Peer => $path) or die $!;
print $server "$request\n";
$server->flush;
print scalar <$server>;
END
control=/run/ringdisk/ublk/server-$server.sock
perl other.pl /tmp/other '{"ok":true,"devices":[],"hand_over":2}' & other=$!
perl other.pl /tmp/older '{"ok":true,"devices":[]}' & older=$!
soon 60 [ -S /tmp/other ]
soon 60 [ -S /tmp/older ]
for kind in other older; do
    sed -i.kept "s|$control|/tmp/$kind|" /run/ringdisk/ublk/0.json
    ended $kind ringdisk ublk upgrade --all
    mv /run/ringdisk/ublk/0.json.kept /run/ringdisk/ublk/0.json
done
kill $other $older
perl ask.pl $control '{"command":"hand-over","version":2,"devices":[0,1,2,3,4,5,6,7,8]}' | sed 's/^/version /'
perl ask.pl $control '{"command":"hand-over","version":1,"devices":[0,1]}' | sed 's/^/part /'
served on $server

# What a service manager hears when it has the server replaced: of a successor that is refused, and of one that is not.
cat >hear.pl <<'END'
use IO::Socket::UNIX;
my $manager = IO::Socket::UNIX->new(Local => $ARGV[0], Type => SOCK_DGRAM) or die $!;
$| = 1;
while (defined $manager->recv(my $said, 1000)) { print "$said\n" }
END
perl hear.pl /tmp/notify >heard & hear=$!
perl other.pl /tmp/busy '{"ok":true,"devices":[],"hand_over":1}' '{"ok":false,"error":"not now"}' & busy=$!
soon 60 [ -S /tmp/notify ]
soon 60 [ -S /tmp/busy ]
reload() { env NOTIFY_SOCKET=/tmp/notify /mnt/ringdisk ublk upgrade --server $server --daemonize; }
sed -i.kept "s|$control|/tmp/busy|" /run/ringdisk/ublk/0.json
ended busy reload
mv /run/ringdisk/ublk/0.json.kept /run/ringdisk/ublk/0.json
served kept $server
ended reload reload
wait $server && echo "gone reload"
old=$server
server=$(pid_of 0)
heard() { grep -q READY heard; }
soon 60 heard
sed "s/=$old\$/=OLD/; s/=$server\$/=NEW/; s/=[0-9][0-9]*\$/=OTHER/; s/READY=.*/READY/" heard | tr '\n' ' ' | sed 's/^/heard /'
echo
sed -n 's/^PPid:[^0-9]*/parent /p' /proc/$server/status
served reloaded $server
ended nobody ringdisk ublk upgrade --server $old
kill $hear $busy
loaded
# The last one is the shell's own again.
add last upgrade --server $server

kill -INT $load
wait $load || [ $? = 128 ] || { cat /tmp/fio *.err; exit 1; }
! grep -E 'err= *[1-9]|verify:|error' /tmp/fio || { cat /tmp/fio; exit 1; }
echo "load 0"
holds C end
for id in 0 1 2 3 4 5 6 7 8; do kept /dev/ublkb$id kept.$id; done
# What the host knows of a disk, and what its workers may wait for when memory is short.
limits="logical_block_size max_hw_sectors_kb dma_alignment optimal_io_size discard_granularity fua chunk_sectors"
for name in $limits write_cache; do echo "$name $(cat /sys/block/ublkb0/queue/$name)"; done | tr '\n' ' ' | sed 's/^/limits /'
echo
# Those that were killed had made it shorter.
cat /sys/block/ublkb*/queue/io_timeout | sort | uniq -c | tr -s ' \n' ' ' | sed 's/^/timeouts/'
echo
for task in /proc/$server/task/*; do
    case $(cat $task/comm) in
    ublk*)
        set -- $(sed 's/.*) //' $task/stat)
        # PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE.
        [ $(($7 & 0x180000)) = $((0x180000)) ] && echo flusher || echo "waits for itself: $7"
        ;;
    esac
done | sort | uniq -c | tr -s ' \n' ' ' | sed 's/^/workers/'
echo
kill $server
wait $server && echo "server 0"
for id in 0 1 2 3 4 5 6 7 8; do
    sound $(image $id)
    same kept.$id $(image $id) $id
done

# Recovered again, and removed, when a recovery has begun and its server has died.
moments="050 200"
[ "$own_transports" != zero-copy ] || moments=100
for ms in $moments; do
    add gone add --id 0 --disk $(disk 0),num_queues=2 $(disk 1)
    kill -9 $server
    wait $server || true
    /mnt/ringdisk ublk recover --all >/dev/null 2>&1 & dead=$!
    sleep 0.$ms
    kill -9 $dead
    wait $dead || true
    ended resumed ringdisk ublk recover --all --daemonize
    ended removed ringdisk ublk del --all --force
done
ringdisk ublk list | wc -l | sed 's/^/remaining /'
sound $(image 0)

# A device that goes with its server has no request wait for one.
dmesg | grep -c 'I/O error' | sed 's/^/errors /' || true
add off add --id 0 --disk $(disk 0),ops_size=1,ops_refill_time=60000 --recovery off
looks=
for n in 1 2 3; do
    dd if=/dev/ublkb0 of=/dev/null bs=4k count=1 skip=$n iflag=direct status=none 2>/dev/null & looks="$looks $!"
done
sleep 1
kill -9 $server
wait $server || true
began=$(date +%s)
failed=0
for look in $looks; do wait $look || failed=$((failed + 1)); done
echo "failed $failed in $(($(date +%s) - began)) s"
