//! Working through a document: its blocks in order, in a folder of its own.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use ringdisk_gen::patience::PATIENCE;

use crate::block::{Block, Use};

/// Runs the blocks of a document that can run, and ends the servers that it started.
///
/// `/run` and `/srv` are folders of the scratch directory, and `disk.qcow2` is an image that the reader has.
pub(crate) fn document(blocks: &[Block]) -> Result<(), String> {
    let scratch = tempfile::tempdir().map_err(|error| error.to_string())?;
    shell(
        scratch.path(),
        "mkdir run srv; ringdisk image create disk.qcow2 20G",
    )?;
    let mut servers = Vec::new();
    for block in blocks {
        let about = |error: String| format!("{}: {error}", block.place);
        match &block.usage {
            Use::Run => shell(scratch.path(), &block.text).map_err(about)?,
            Use::Serves => servers.push(Server::start(scratch.path(), block).map_err(about)?),
            Use::NotRun(_) => {}
        }
    }
    // The last one has what those before it have handed over.
    for server in servers.iter_mut().rev() {
        server.end()?;
    }
    Ok(())
}

/// A command that runs `script` as a reader's shell would.
fn command(scratch: &Path, script: &str) -> Command {
    let binary = Path::new(env!("CARGO_BIN_EXE_ringdisk"));
    let folder = binary.parent().unwrap_or(Path::new("/"));
    let path = std::env::var("PATH").unwrap_or_default();
    let root = scratch.display().to_string();
    let script = script
        .replace("/run/", &format!("{root}/run/"))
        .replace("/srv/", &format!("{root}/srv/"));
    let mut command = Command::new("sh");
    command
        .args(["-eu", "-c", &script])
        .current_dir(scratch)
        .env("PATH", format!("{}:{path}", folder.display()))
        .env_remove("RINGDISK_LOG")
        .stdin(Stdio::null());
    command
}

fn shell(scratch: &Path, script: &str) -> Result<(), String> {
    let output = command(scratch, script)
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    Err(format!("{}\n{script}{said}", output.status))
}

/// A server that a document has started; killed when dropped.
struct Server {
    place: String,
    child: Child,
}

impl Server {
    /// Starts it and waits until it says that it serves.
    fn start(scratch: &Path, block: &Block) -> Result<Self, String> {
        if block.commands()?.len() != 1 || !block.text.starts_with("ringdisk ") {
            return Err("expected one `ringdisk` command in a block that serves".to_owned());
        }
        let child = command(scratch, &format!("exec {}", block.text))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| error.to_string())?;
        let place = block.place.clone();
        let mut server = Self { place, child };
        let (sender, lines) = mpsc::channel();
        let output = server.child.stdout.take();
        std::thread::spawn(move || {
            for line in BufReader::new(output?).lines() {
                sender.send(line.ok()?).ok()?;
            }
            Some(())
        });
        let deadline = Instant::now() + PATIENCE;
        loop {
            match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if line.starts_with("serving ") => return Ok(server),
                Ok(_) => {}
                Err(error) => {
                    server.child.kill().unwrap_or_default();
                    let mut said = String::new();
                    if let Some(mut errors) = server.child.stderr.take() {
                        errors.read_to_string(&mut said).unwrap_or_default();
                    }
                    return Err(format!("it does not serve ({error}): {said}"));
                }
            }
        }
    }

    /// Ends it, unless it has handed over and ended by itself.
    fn end(&mut self) -> Result<(), String> {
        let about = |error: std::io::Error| format!("{}: {error}", self.place);
        if self.child.try_wait().map_err(about)?.is_none() {
            let pid = self.child.id().to_string();
            Command::new("kill").arg(pid).status().map_err(about)?;
        }
        let status = self.wait()?;
        if status.success() {
            return Ok(());
        }
        Err(format!("{}: the server ended with {status}", self.place))
    }

    fn wait(&mut self) -> Result<ExitStatus, String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let ended = self.child.try_wait();
            if let Some(status) = ended.map_err(|error| format!("{}: {error}", self.place))? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                return Err(format!("{}: the server does not end", self.place));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().unwrap_or_default();
        self.child.wait().map(drop).unwrap_or_default();
    }
}
