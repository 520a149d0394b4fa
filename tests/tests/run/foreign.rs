//! A disk that another process serves comes to a running machine, and goes again.

use super::{nested, take};
use lab::{Error, Scratch, image};

/// Works on the disk, lets it go when it is asked to, and finds everything again when it comes back.
const INNER: &str = include_str!("../../guest/run/foreign.inner.sh");

#[test]
fn backend_disk_is_hot_plugged_and_removed() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let script = include_str!("../../guest/run/foreign.sh");
    let (outcome, tools) = nested(&lab, &scratch, &[("far", INNER)], script)?;
    let all = outcome.lines().collect::<Vec<_>>().join("\n");
    let has = |wanted: &str| assert!(all.contains(wanted), "no {wanted:?}: {all}");
    for wanted in [
        "nobody ringdisk: ",
        "twice ringdisk: a disk has the id `far` already",
        "inner found vdc of 2 queues",
        r#"removed {"id":"far","ok":true}"#,
        ": OK",
        "inner @@exit 0",
    ] {
        has(wanted);
    }
    let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
    assert!(value("with ").contains(r#""io":"vhost-user""#), "{all}");
    assert!(!value("without ").contains("far"), "{all}");
    let added = outcome.lines().filter(|line| line.starts_with("added "));
    assert_eq!(
        added.filter(|line| line.contains(r#""ok":true"#)).count(),
        2,
        "{all}"
    );
    assert_eq!((value("ended "), value("served ")), ("0", "0"), "{all}");
    image::check_flawless(&take(&scratch, &tools, "data.qcow2")?)?;
    Ok(())
}
