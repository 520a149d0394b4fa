//! A machine whose kernel comes from its disk, by firmware.

use lab::nested::Toolbox;
use lab::{Error, Scratch};

use crate::nested_with;

/// As a cloud image begins: shim and GRUB from its disk, started by the firmware that Debian packages for Cloud Hypervisor. QEMU 10.0 ends
/// in many runs, before Linux begins: see `is_of_emulated_cr8`.
#[test]
#[expect(
    clippy::print_stdout,
    reason = "what cannot run here is counted by what it prints"
)]
fn boots_linux_from_a_disk() -> Result<(), Error> {
    let Some(efi) = lab::require_efi() else {
        return Ok(());
    };
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let disk = efi.disk(
        &lab,
        &scratch,
        include_str!("../../guest/run/firmware.inner.sh"),
        "console=ttyS0 loglevel=5 panic=1 lab.root=0000:00:01.0",
    )?;
    let toolbox = Toolbox::new(&lab, &scratch)?.file(&disk)?.file(&efi.firmware())?;
    let script = include_str!("../../guest/run/firmware.sh");
    let outcome = match nested_with(&lab, &scratch, toolbox, &[], script) {
        Err(error) if error.is_of_emulated_cr8() => {
            println!(
                "cannot run here: a boot by firmware, because QEMU's emulation of SVM ended when that wrote CR8"
            );
            return Ok(());
        }
        result => result?.0,
    };
    let all = outcome.lines().collect::<Vec<_>>().join("\n");
    assert!(all.contains("ended 0"), "{all}");
    // The firmware is loaded anew when the guest restarts.
    for time in ["first", "second"] {
        for line in [
            format!("{time} EFI v"),
            format!("{time} efi"),
            format!("{time} cpus 1"),
        ] {
            assert!(all.contains(&format!("inner {line}")), "{line} is missing: {all}");
        }
    }
    Ok(())
}
