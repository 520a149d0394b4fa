//! Disks whose configuration changes, in a server within the test; tests of whole servers are in `tests/restart/serve.rs`.

use super::super::roster::tests::House;
use super::*;
use crate::disk_config::WriteErrors;

fn config(house: &House, name: &str) -> DiskConfig {
    let disk = house.roster.find(name).expect("it is served");
    DiskConfig::clone(&disk.image.config())
}

/// Found good, and then gone: the image cannot be opened the new way.
#[test]
fn disk_that_cannot_be_opened_the_new_way_is_served_as_before() {
    let house = House::of(["a"]);
    let before = config(&house, "a");
    let wrong = DiskConfig {
        path: house.path("none"),
        ..before.clone()
    };
    let error = house.roster.change("a", Change::Opening, wrong);
    let error = error.expect_err("there is no such image");
    assert!(
        error.contains("it is served as before: ") && error.contains("No such file"),
        "{error}"
    );
    assert_eq!(config(&house, "a"), before);
    assert!(house.connects("a"));
    let disk = house.roster.find("a").expect("it is served");
    disk.disk.flush().expect("its image is open");
    let better = DiskConfig {
        werror: WriteErrors::Wait,
        ..before
    };
    house
        .roster
        .change("a", Change::Opening, better.clone())
        .expect("a change");
    assert_eq!(config(&house, "a"), better);
    drop(disk);
    house.stop.stop();
    assert_eq!(house.end(), None);
}

/// Another file has the name of the image, which the guest would find under its feet.
#[test]
fn disk_whose_image_was_replaced_does_not_change() {
    let house = House::of(["a"]);
    std::fs::rename(house.path("a"), house.path("aside")).expect("a file");
    for replaced in [false, true] {
        if replaced {
            std::fs::write(house.path("a"), [1; 4096]).expect("a file");
        }
        let error = house.roster.change("a", Change::Opening, config(&house, "a"));
        let error = error.expect_err("it is another image");
        let said = if replaced {
            "is another file than the one that is locked"
        } else {
            "No such file"
        };
        assert!(
            error.contains("cannot hold the locks of its image: ") && error.contains(said),
            "{error}"
        );
        assert!(house.connects("a"), "nothing was closed");
    }
    house.stop.stop();
    assert_eq!(house.end(), None);
}

/// The image becomes one that cannot be opened when it has just been closed.
#[test]
fn disk_that_cannot_be_opened_at_all_is_given_up_alone() {
    let house = House::of(["a", "b"]);
    let disk = house.roster.find("a").expect("it is served");
    let now = disk.image.config();
    let lost = DiskConfig {
        path: house.path("none"),
        ..DiskConfig::clone(&now)
    };
    disk.image.set_config(Arc::new(lost.clone()));
    drop((disk, now));
    let error = house.roster.change("a", Change::Opening, lost);
    let error = error.expect_err("there is no such image");
    assert!(error.contains("No such file"), "{error}");
    assert_eq!(house.names(), ["b"]);
    assert!(!house.connects("a") && house.connects("b"));
    house.stop.stop();
    let failure = house.end().expect("a reason to start again");
    assert!(failure.starts_with("a: "), "{failure}");
}

#[test]
fn server_without_a_file_has_nothing_to_follow() {
    let house = House::of(["a"]);
    let error = house.roster.reload().expect_err("no file");
    assert!(error.contains("ringdisk serve --config FILE"), "{error}");
    house.stop.stop();
    assert_eq!(house.end(), None);
}
