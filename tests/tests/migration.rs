//! A stock Linux guest migrates between two QEMUs, each with servers of its own on the same images, while it writes and reads back.
#![expect(clippy::print_stdout, reason = "a number that was measured is worth a line")]

use std::path::PathBuf;
use std::time::Duration;

use lab::{Error, Guest, Lab, Scratch, Server, image};

const MIB: u64 = 1 << 20;
/// The number of times that the guest migrates, there and back.
const MIGRATIONS: usize = 10;
/// The rounds of work: one for each migration, and a few more, as rounds may be the shorter ones.
const ROUNDS: usize = 16;

/// The servers of one host: one for each disk of the guest.
struct Host {
    name: &'static str,
    root: Server,
    data: Server,
    control: PathBuf,
}

impl Host {
    fn start(
        scratch: &Scratch,
        name: &'static str,
        images: &[PathBuf; 2],
        arguments: &[&str],
    ) -> Result<Self, Error> {
        let [root, data] = images;
        let control = scratch.file(&format!("{name}.control"));
        let path = control.display().to_string();
        let with_control: Vec<&str> = arguments.iter().copied().chain(["--control", &path]).collect();
        let root_disk = format!("path={},backing_files=on", root.display());
        let data_disk = format!("path={},num_queues=2,id=data", data.display());
        Ok(Self {
            name,
            root: Server::ringdisk_with(arguments, &scratch.file(&format!("{name}-root.sock")), &root_disk)?,
            data: Server::ringdisk_with(
                &with_control,
                &scratch.file(&format!("{name}-data.sock")),
                &data_disk,
            )?,
            control,
        })
    }

    fn guest<'lab>(&self, lab: &'lab Lab) -> Guest<'lab> {
        Guest::new(lab)
            .cpus(2)
            .memory_mib(384)
            .disk("root", self.root.socket(), 1)
            .disk("data", self.data.socket(), 2)
            .script(&format!(
                "ROUNDS={ROUNDS}\n{}",
                include_str!("../guest/vhost_user/migrates.sh")
            ))
            .patience(Duration::from_secs(900))
            .migrates()
    }

    /// Returns true if its server has the data disk's image open.
    fn has_image(&self) -> Result<bool, Error> {
        let socket = self.control.display().to_string();
        let said = image::ringdisk(&["ctl", "--socket", &socket, "disk-list", "--json"])?;
        let (open, closed) = (said.contains("\"open\":true"), said.contains("\"open\":false"));
        assert_ne!(open, closed, "{}: {said}", self.name);
        Ok(open)
    }

    fn stop(self) -> Result<(), Error> {
        self.root.stop()?;
        self.data.stop()
    }
}

#[test]
fn guest_migrates_back_and_forth_under_load_and_loses_nothing() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let images = [scratch.file("root.qcow2"), scratch.file("data.qcow2")];
    image::overlay(&images[0], lab.base())?;
    image::create(&images[1], "qcow2", "cluster_size=64k", 256 * MIB)?;
    let hosts = [
        Host::start(&scratch, "a", &images, &[])?,
        Host::start(&scratch, "b", &images, &["--incoming"])?,
    ];
    assert!(hosts[0].has_image()? && !hosts[1].has_image()?);
    let mut guest = hosts[0].guest(&lab).boot(&scratch, "guest-0")?;
    let mut still = Vec::new();
    for migration in 1..=MIGRATIONS {
        guest.wait_for(|line| line == format!("round {migration}"))?;
        let [from, to] = [&hosts[(migration + 1) % 2], &hosts[migration % 2]];
        let name = format!("guest-{migration}");
        let time = guest.migrate(&to.guest(&lab), &scratch, &name).inspect_err(|_| {
            for server in hosts.iter().flat_map(|host| [&host.root, &host.data]) {
                println!("{}", server.evidence());
            }
        })?;
        still.push(time.as_millis());
        // What runs there has its image.
        guest.wait_for(|line| line == format!("round {}", migration + 1))?;
        assert!(!from.has_image()? && to.has_image()?, "migration {migration}");
    }
    let last = guest.lines().into_iter().rfind(|line| line.starts_with("round "));
    assert_ne!(
        last,
        Some(format!("round {ROUNDS}")),
        "the guest worked all the time"
    );
    let outcome = guest.finish()?;
    assert_eq!(outcome.value("rounds "), Some(ROUNDS.to_string().as_str()));
    assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    println!("the guest stood still for {still:?} ms");
    for host in hosts {
        host.stop()?;
    }
    images.iter().try_for_each(|image| image::check_flawless(image))
}
