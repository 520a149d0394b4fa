//! Faults of the programs below the tests, each known by its signature.
//!
//! They are the only reasons to [begin a test again](crate::begun_again). A signature is as narrow as its fault: what looks
//! only alike may be the answer to something that a server of ours did, and fails its test.

use crate::results::{RESTARTED, boots, scripts_part};

/// The assertions with which QEMU 10.0 ends, once in many runs, when the CPUs of an emulated guest change its page tables: what
/// it remembers of a translation names a memory region that there is no more, or another one, which cannot take the access.
const EMULATOR: [&str; 2] = ["iotlb_to_section: Assertion", "msix_table_mmio_write: Assertion"];

/// The assertion with which QEMU 10.0 ends when a machine in an emulated guest writes its CR8 while an interrupt waits for it: QEMU's
/// `helper_write_crN` tells the CPU of the interrupt without the lock that this wants. EDK II writes CR8 at the end of each interrupt;
/// Linux does not.
const CR8: &str = "tcg_handle_interrupt: assertion failed: (bql_locked())";

/// The function in which Linux 7.2 follows a pointer of a list entry that it has deleted, seen once in 130 hand-overs on
/// a busy machine: the ring of a process that has ended cancels its ublk commands. Seen once on the same way, and most likely the same:
/// the entry has another use already, and the driver warns of a command that is not the one it knows.
const CANCEL: &str = "io_uring_try_cancel_uring_cmd";

/// The words that `ringdisk run` logs when KVM has stopped a CPU whose exceptions nothing handled.
const TRIPLE_FAULT: &str = "a triple fault";

/// Returns what failed, if these lines of an outer guest's script show that the machine in it restarted in the middle of its own script
/// and without a word: KVM says that a CPU of it had a triple fault, and its kernel complains of nothing. QEMU's emulation of SVM does
/// that under load, whichever program the machine belongs to. The lines are those of the machine's console, each after `inner `,
/// and of its log, each after `err `.
pub(crate) fn of_machine<'a>(
    said: impl Iterator<Item = &'a str> + Clone,
    complains: impl Fn(&str) -> bool,
) -> Option<&'static str> {
    let told = |prefix: &'static str| said.clone().filter_map(move |line| line.strip_prefix(prefix));
    let console: String = told("inner ").flat_map(|line| [line, "\n"]).collect();
    let restarted = boots(&scripts_part(&console)).is_err_and(|what| what == RESTARTED);
    let without_a_word =
        !console.lines().any(complains) && told("err ").any(|line| line.contains(TRIPLE_FAULT));
    (restarted && without_a_word)
        .then_some("the machine in its guest had a triple fault, and its kernel said nothing")
}

/// Returns what failed, if a QEMU that ended as `status` says, with this log, failed in its own emulation of a
/// processor.
pub(crate) fn of_emulator(command: &str, status: &str, log: &str) -> Option<&'static str> {
    let own = aborted(command, status) && EMULATOR.iter().any(|assertion| log.contains(assertion));
    own.then_some("QEMU failed in its translation of an address")
}

/// Returns true if a QEMU that ended as `status` says, with this log, failed as a machine in its guest wrote CR8.
pub(crate) fn is_of_cr8(command: &str, status: &str, log: &str) -> bool {
    aborted(command, status) && log.contains(CR8)
}

/// Returns true if a command that ended as `status` says is QEMU's and called `abort`.
fn aborted(command: &str, status: &str) -> bool {
    command.contains("qemu-system") && status.contains("signal: 6 ")
}

/// Returns what failed, if this console shows a known fault of the guest's own kernel, and nothing before it that it
/// complained of.
///
/// `complains` tells the lines with a complaint.
pub(crate) fn of_kernel(console: &str, complains: impl Fn(&str) -> bool) -> Option<&'static str> {
    let mut lines = console.lines().skip_while(|line| !complains(line));
    let first = lines.next()?;
    let report: Vec<&str> = lines.take_while(|line| !line.contains("end trace")).collect();
    let has = |what: &str, text: &str| {
        report
            .iter()
            .any(|line| line.contains(what) && line.contains(text))
    };
    let deleted = first.contains("Oops: general protection fault")
        && first.contains("0xdead000000000100")
        && has("RIP: ", CANCEL);
    let reused = first.contains("WARNING: drivers/block/ublk_drv.c")
        && first.contains(" at ublk_ch_uring_cmd+")
        && has("]  ", CANCEL);
    ((deleted || reused) && has("Workqueue: iou_exit", "io_ring_exit_work"))
        .then_some("its guest's kernel failed in io_uring_try_cancel_uring_cmd")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_emulator_finds_only_the_emulators_own_faults() {
        let assertion =
            "qemu: ../accel/tcg/cputlb.c: iotlb_to_section: Assertion `section_index < n' failed.";
        let aborted = "signal: 6 (SIGABRT)";
        assert!(of_emulator("qemu-system-x86_64 -smp 2", aborted, assertion).is_some());
        let other = "qemu: hw/pci/msix.c:228: msix_table_mmio_write: Assertion `addr + size <= n' failed.";
        assert!(of_emulator("qemu-system-x86_64 -smp 2", aborted, other).is_some());
        assert!(of_emulator("ringdisk serve", aborted, assertion).is_none());
        assert!(of_emulator("qemu-system-x86_64", aborted, "").is_none());
        let ours = "qemu: ../hw/virtio/vhost-user.c: vhost_user_read: Assertion `size == 8' failed.";
        assert!(of_emulator("qemu-system-x86_64", aborted, ours).is_none());
        assert!(of_emulator("qemu-system-x86_64", "signal: 9 (SIGKILL)", assertion).is_none());
        assert!(of_emulator("qemu-system-x86_64", "exit status: 1", assertion).is_none());
        let cr8 = "ERROR:accel/tcg/tcg-accel-ops.c:95:tcg_handle_interrupt: assertion failed: (bql_locked())";
        assert!(is_of_cr8("qemu-system-x86_64 -smp 1", aborted, cr8));
        assert!(!is_of_cr8("qemu-system-x86_64", aborted, assertion));
        assert!(!is_of_cr8("ringdisk run", aborted, cr8));
    }

    #[test]
    fn of_machine_finds_only_a_triple_fault_without_a_word() {
        let complains = |line: &str| line.contains("Kernel panic");
        let known = |said: &str| of_machine(said.lines(), complains).is_some();
        let said = "\
inner lab: init
inner @@begin
inner disk data
err WARN a triple fault: the guest's kernel failed, or restarts as a last resort cpu=1
inner [    1.332282] acpi PNP0A03:00: fail to add MMCONFIG information
inner @@begin
inner disk data
inner @@exit 0
inner @@stop
inner [   29.350371] reboot: Power down
";
        assert!(known(said));
        assert!(!known(&said.replacen("@@begin\n", "\n", 1)), "it ran once");
        let told = said.replacen("inner disk data\n", "inner @@exit 0\ninner @@stop\n", 1);
        assert!(!known(&told), "it was told to restart");
        assert!(!known(&said.replace("a triple fault", "a reset")), "another end");
        let panicked = said.replacen("disk data", "Kernel panic - not syncing", 1);
        assert!(
            !known(&panicked),
            "its kernel failed, maybe by what a disk gave it"
        );
    }

    /// The lines that matter of a console where it happened.
    const OOPS: &str = "\
lab: init
[   44.264624] Oops: general protection fault, probably for non-canonical address 0xdead000000000100: 0000 [#1] SMP NOPTI
[   44.264624] CPU: 1 UID: 0 PID: 29 Comm: kworker/u8:1 Not tainted 7.2.12+deb14-cloud-amd64 #1 PREEMPT(lazy)
[   44.264624] Workqueue: iou_exit io_ring_exit_work
[   44.264624] RIP: 0010:io_uring_try_cancel_uring_cmd+0x4e/0x120
[   44.301529] ---[ end trace 0000000000000000 ]---
[   82.901253] EXT4-fs (vda): re-mounted 11e85bab-3fb2-4b83-bd74-624568686dd8 ro.
";

    /// The same, where the entry had another use already.
    const WARNING: &str = "\
lab: init
[   21.838501] WARNING: drivers/block/ublk_drv.c:2908 at ublk_ch_uring_cmd+0xee/0x140 [ublk_drv], CPU#0: kworker/u4:3/177
[   21.841090] Workqueue: iou_exit io_ring_exit_work
[   21.841306] RIP: 0010:ublk_ch_uring_cmd+0xee/0x140 [ublk_drv]
[   21.847828]  io_uring_try_cancel_uring_cmd+0x7e/0x120
[   21.851787] ---[ end trace 0000000000000000 ]---
[   21.883961] BUG: kernel NULL pointer dereference, address: 0000000000000000
";

    #[test]
    fn of_kernel_finds_only_the_known_fault() {
        let complains = |line: &str| {
            ["Oops", "WARNING:", "I/O error"]
                .iter()
                .any(|text| line.contains(text))
        };
        let known = |console: &str| of_kernel(console, complains).is_some();
        assert!(known(OOPS) && known(WARNING));
        for (text, other) in [
            ("try_cancel_uring_cmd", "cmd_work"),
            ("iou_exit io_ring_exit_work", "ublk"),
            ("at ublk_ch_uring_cmd+", "at ublk_dispatch_req+"),
        ] {
            assert!(!known(&WARNING.replace(text, other)), "not {text}");
        }
        assert!(!known(""));
        assert!(
            !known(&OOPS.replace("try_cancel_uring_cmd", "cmd_done")),
            "another place"
        );
        assert!(
            !known(&OOPS.replace("iou_exit io_ring_exit_work", "ublk")),
            "another way to it"
        );
        assert!(
            !known(&OOPS.replace("0xdead000000000100", "0x8")),
            "another pointer"
        );
        let before = format!("[ 40.0] I/O error, dev ublkb0, sector 8\n{OOPS}");
        assert!(!known(&before), "something else went wrong first");
    }
}
