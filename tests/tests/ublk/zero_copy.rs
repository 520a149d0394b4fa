//! Zero copy, where the kernel has it: data that is not a file's bytes, requests whose pages the driver could not
//! register, and which requests go which way, as the server itself counts them.

use super::{CPUS, run_in, said};
use lab::{Error, Kernel, Outcome, Scratch};

/// Every kind of extent, read and written by pages alone; the judge is the same image read by QEMU's tools.
const CONTENT: &str = include_str!("../../guest/ublk/zero_copy.sh");

/// A number of a line of JSON.
fn number(line: &str, key: &str) -> u64 {
    let key = format!("\"{key}\":");
    let digits = line
        .split(&key)
        .nth(1)
        .and_then(|rest| rest.split([',', '}']).next());
    digits
        .and_then(|digits| digits.parse().ok())
        .unwrap_or_else(|| panic!("no {key} in {line}"))
}

/// Checks by its counts that a server asked for `transport` used it, and no other.
pub(super) fn assert_in_force(transport: &str, outcome: &Outcome) {
    let key = format!("info {transport} ");
    let infos: Vec<&str> = outcome.lines().filter(|line| line.starts_with(&key)).collect();
    assert!(!infos.is_empty(), "no {key}: {}", said(outcome));
    for line in infos {
        let (zero_copied, copied, fallbacks) = ways(line);
        assert!(zero_copied + copied > 0, "{line}");
        let unused = if transport == "zero-copy" {
            copied
        } else {
            zero_copied
        };
        assert_eq!((unused, fallbacks), (0, 0), "{line}");
    }
}

/// Requests by zero copy, by copies, and those of the latter whose pages could not be registered.
fn ways(line: &str) -> (u64, u64, u64) {
    let get = |key| number(line, key);
    (get("zero_copied"), get("copied"), get("fallbacks"))
}

#[test]
fn zero_copy_fills_pages_and_copies_small_or_unregistered() -> Result<(), Error> {
    let Some(lab) = lab::require_kernel(Kernel::V7) else {
        return Ok(());
    };
    let scratch = Scratch::new()?;
    let outcome = run_in(&lab, &scratch, CPUS, CONTENT, Ok, |guest| guest)?;
    let all = said(&outcome);
    let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
    assert_eq!(count("made "), 4, "{all}");
    let in_force = r#""transport":"zero-copy""#;
    let mut made = outcome.lines().filter(|line| line.starts_with("made "));
    assert!(made.all(|line| line.contains(in_force)), "{all}");
    for kind in ["compressed", "zstd", "plain"] {
        assert_eq!(count(&format!("read {kind} ")), 5, "{kind}: {all}");
        assert_eq!(count(&format!("stopped {kind}")), 1, "{kind}: {all}");
        assert_eq!(count(&format!("same {kind}")), 1, "{kind}: {all}");
    }
    assert_eq!(count("read read-only "), 3, "{all}");
    assert_eq!(
        (count("stopped fallback"), count("same fallback")),
        (2, 2),
        "{all}"
    );
    assert_eq!(count("same direct"), 2, "{all}");
    assert_eq!((count("sums fine"), count("server 0")), (1, 1), "{all}");
    assert_eq!(count("flawless "), 8, "{all}");
    let counted = |name: &str| {
        let key = format!("counts {name} ");
        let line = outcome.lines().find(|line| line.starts_with(&key));
        ways(line.unwrap_or_else(|| panic!("no {key}: {all}")))
    };
    for name in ["compressed", "zstd", "plain", "direct", "mounted"] {
        let (zero_copied, copied, fallbacks) = counted(name);
        assert!(zero_copied > 0 && copied == 0 && fallbacks == 0, "{name}: {all}");
    }
    let (zero_copied, copied, fallbacks) = counted("auto");
    assert!(zero_copied > 0 && copied > 0 && fallbacks == 0, "{all}");
    for name in ["fallback-1", "fallback-2"] {
        let (zero_copied, copied, fallbacks) = counted(name);
        assert!(
            zero_copied > 0 && copied > 0 && fallbacks == copied,
            "{name}: {all}"
        );
    }
    assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    Ok(())
}
