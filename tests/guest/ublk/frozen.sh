# Servers of servers.sh whose writes are under way for long when they are followed.
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
    # The locks come when all is done, so whoever has a descriptor has opened an image.
    [ $(ls -l /proc/$slow/fd | grep -c /run/slow) = 0 ] || early=1
    [ $step != 10 ] || kill -9 $c
    sleep 0.1
done
echo "early $early"
alive $b && alive $slow && [ -d /proc/$writer ] && [ "$(pid_of 3)" = $b ] && echo "slow waits"
fsfreeze -u /run/slow
wait $writer && echo "slow written"
wait $b && echo "slow left"
wait $c || true
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

# A server whose host does not answer in the time that there is ends as if it were killed.
letters D
fsfreeze -f /run/slow
put D & writer=$!
sleep 1
old=$server
/mnt/ringdisk --log info ublk upgrade --all --within 1 >late.out 2>late.err & late=$!
# What the old server tells is there before the host answers. The time it names is what was left of the second when it began to wait.
soon 60 grep -q 'has not \(answered all requests\|closed its images within\) ' late.err && echo "late told" || cat late.err
[ ! -s late.out ] && alive $late && [ -d /proc/$writer ] && echo "late waits"
fsfreeze -u /run/slow
wait $old || true
up late $late
wait $writer && echo "late written"
holds D late
served late $server
loaded
