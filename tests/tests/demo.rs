//! `make demo` on both kinds of machine: where KVM runs no guest, and in an emulated guest whose KVM is real.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use lab::nested::{Nested, Size, Toolbox};
use lab::{Error, Scratch};

const MIB: u64 = 1 << 20;

#[test]
fn demo_works_here_and_says_how() {
    let _lab = lab::require();
    let output = Command::new(env!("CARGO_BIN_EXE_demo"))
        .output()
        .expect("run the demo");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("\nIt worked: "),
        "{said}"
    );
    let (machine, emulated) = (
        said.contains("boots from it on KVM"),
        said.contains("KVM runs no guest here ("),
    );
    assert!(machine != emulated, "{said}");
}

#[test]
fn demo_uses_our_machine_where_kvm_is_real() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let mut toolbox = Toolbox::new(&lab, &scratch)?
        .program(Path::new(env!("CARGO_BIN_EXE_demo")), "demo")?
        .file(lab.initramfs())?
        .file(lab.base())?;
    for tool in ["qemu-img", "qemu-io", "qemu-storage-daemon", "qemu-system-x86_64"] {
        toolbox = toolbox.program(&Path::new("/usr/bin").join(tool), tool)?;
    }
    let script = r#"
mount /dev/lab/tools /mnt
mkdir /mnt/tmp
echo any >/mnt/kernel-version
PATH=/mnt:$PATH RINGDISK_LAB_GUEST=/mnt RINGDISK_BIN=/mnt/ringdisk TMPDIR=/mnt/tmp /mnt/demo
"#;
    let nested = Nested {
        lab: &lab,
        scratch: &scratch,
        toolbox: &toolbox,
        bytes: 2048 * MIB,
        script,
        // It boots a guest in the guest three times: 83 s on a slow machine, and more than twice as long beside other tests.
        patience: Duration::from_secs(600),
        size: Size::default(),
    };
    let (outcome, _) = nested.run()?;
    let said: Vec<_> = outcome.lines().collect();
    let all = said.join("\n");
    assert!(all.contains("boots from it on KVM"), "{all}");
    assert!(
        all.contains("It worked: a guest ran on a QCOW2 overlay attached by `ringdisk run`"),
        "{all}"
    );
    Ok(())
}
