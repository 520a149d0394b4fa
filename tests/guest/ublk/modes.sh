# What I/O sees in the modes of recovery that do nothing again.
ringdisk image create q.qcow2 64M >/dev/null
modes="wait"
! ringdisk ublk features | grep -q USER_RECOVERY_FAIL_IO || modes="$modes fail"
echo "modes $modes"
look() { dd if=/dev/ublkb0 of=/dev/null bs=4k count=1 skip=$1 iflag=direct status=none; }
for mode in $modes; do
    # So slow that some requests are at the server for long.
    add mode add --disk path=q.qcow2,num_queues=2,ops_size=2,ops_refill_time=4000 --recovery $mode
    looks=
    for n in 1 2 3 4 5 6 7 8; do
        look $n 2>/dev/null & looks="$looks $!"
    done
    sleep 1
    kill -9 $server
    wait $server || true
    failed=0
    for look in $looks; do wait $look || failed=$((failed + 1)); done
    echo "failed $mode $failed"
    case $mode in
    wait)
        state quiesced 1
        look 20 & late=$!
        sleep 2
        [ -d /proc/$late ] && echo "waits $mode"
        ;;
    fail)
        state failing 1
        ended "refused $mode" look 20
        ;;
    esac
    add again recover 0 --disk path=q.qcow2,num_queues=2
    [ $mode = fail ] || { wait $late && echo "then $mode"; }
    look 20 && echo "good $mode"
    verify /dev/ublkb0
    kill $server
    wait $server && echo "server $mode"
    check q.qcow2
done
