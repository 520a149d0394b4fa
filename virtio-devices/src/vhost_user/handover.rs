//! Handing a connected client over to another server, unnoticed by the client.
//!
//! The old server describes its client by the vhost-user messages that would bring a fresh server to the client's
//! state, with the client's descriptors. The new server reads them through a socket pair and checks them as it checks
//! any client's. Then it replaces its end of the pair with the client's connection.
//!
//! ```text
//! old: pause() ── between two messages; queues drained ── state()
//! new:                                                   adopt() ── serve_on()
//! ```
//!
//! Invariants: the messages leave every queue where it was drained, and none of them starts one; queues are started
//! by [`VhostUserServer::serve_on`] only. Until then the old server can continue as before.

use std::error::Error;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures};
use vhost::vhost_user::{BackendReqHandler, Error as MessageError, VhostUserBackendReqHandlerMut};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_MQ};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::backend::{Backend, NotOffered, PROTOCOL_FEATURES};
use super::image::DetachedDisk;
use super::memory::RegionInfo;
use super::{ServeError, VhostUserServer, event, lock};
use crate::blk::{CacheMode, WRITEBACK_OFFSET};

/// The bytes before a message's body: code, flags, length of the body.
pub(super) const HEADER_BYTES: usize = 12;
/// In place of a descriptor: there is none, the queue is polled.
const NO_DESCRIPTOR: u64 = 0x100;
/// As many regions as one message can bring descriptors for.
const TABLE_MAX: usize = 32;

/// One vhost-user message.
#[derive(Debug)]
pub struct Message {
    /// Header and body.
    pub bytes: Vec<u8>,
    /// Its descriptors.
    pub fds: Vec<OwnedFd>,
}

/// All that a server knows of a connected client.
#[derive(Debug)]
pub struct ClientState {
    /// The client's connection, between two of its messages.
    pub connection: UnixStream,
    /// The messages that bring a fresh server to the client's state.
    pub messages: Vec<Message>,
}

/// A connected client whose queues do not run.
pub struct PausedClient {
    pub(super) messages: BackendReqHandler<Mutex<Backend>>,
    pub(super) backend: Arc<Mutex<Backend>>,
    /// The kicks of an adopted client, by queue, which start it.
    kicks: Vec<(u8, Option<File>)>,
}

impl fmt::Debug for PausedClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PausedClient").finish_non_exhaustive()
    }
}

/// An error of handing a client over. The client is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum HandOverError {
    /// The process has no descriptor left, or a socket failed.
    #[error("cannot hand a client's descriptors over")]
    Os(#[from] io::Error),
    /// The client uses `VIRTIO_BLK_F_MQ`, and the new server has one queue.
    #[error("its client uses several queues, and this server has only one")]
    SeveralQueues,
    /// The client uses `VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD`, which the new server does not offer.
    #[error("its client shares a record of its requests in flight, and this server keeps none")]
    InflightTracking,
    /// The new server cannot do something else that the client uses.
    #[error("message {code} of a client was refused: {reason}")]
    Refused {
        /// The message's code.
        code: u32,
        /// The cause.
        reason: String,
    },
}

impl HandOverError {
    /// Returns the error for a message that the new server refused.
    fn refused(code: u32, error: &MessageError) -> Self {
        let not_offered = match error {
            MessageError::ReqHandlerError(error) => {
                error.get_ref().and_then(<dyn Error + Send + Sync>::downcast_ref)
            }
            _ => None,
        };
        match not_offered {
            Some(NotOffered::Features(bits)) if bits & 1 << VIRTIO_BLK_F_MQ != 0 => Self::SeveralQueues,
            Some(NotOffered::ProtocolFeatures(bits))
                if bits & VhostUserProtocolFeatures::INFLIGHT_SHMFD.bits() != 0 =>
            {
                Self::InflightTracking
            }
            _ => Self::Refused {
                code,
                reason: error.to_string(),
            },
        }
    }
}

fn words(words: impl IntoIterator<Item = u64>) -> Vec<u8> {
    words.into_iter().flat_map(u64::to_ne_bytes).collect()
}

fn halves(first: u32, second: u32) -> Vec<u8> {
    [first.to_ne_bytes(), second.to_ne_bytes()].concat()
}

/// The header of a message of version 1, to which no answer is wanted.
pub(super) fn header(code: u32, body_bytes: u32) -> Vec<u8> {
    let mut bytes = halves(code, 1);
    bytes.extend(body_bytes.to_ne_bytes());
    bytes
}

fn region_words(info: RegionInfo) -> Vec<u8> {
    words([info.guest, info.size, info.user, info.file_offset])
}

/// Messages, as they are put together.
#[derive(Default)]
struct Script(Vec<Message>);

impl Script {
    fn say(&mut self, code: FrontendReq, body: &[u8]) {
        self.say_with(code, body, Vec::new());
    }

    fn say_with(&mut self, code: FrontendReq, body: &[u8], fds: Vec<OwnedFd>) {
        // Bodies are short: 32 regions are the longest.
        let mut bytes = header(code as u32, body.len() as u32);
        bytes.extend(body);
        self.0.push(Message { bytes, fds });
    }

    /// A message with an event of queue `index`, or without one.
    fn say_event(&mut self, code: FrontendReq, index: u8, fd: Option<OwnedFd>) {
        let none = if fd.is_some() { 0 } else { NO_DESCRIPTOR };
        self.say_with(code, &words([u64::from(index) | none]), fd.into_iter().collect());
    }
}

impl Backend {
    /// The messages that bring a fresh server to where this one is. Its queues must not run.
    fn script(&self) -> io::Result<Vec<Message>> {
        let mut script = Script::default();
        script.say(FrontendReq::SET_OWNER, &[]);
        script.say(FrontendReq::GET_FEATURES, &[]);
        if self.features != 0 {
            script.say(FrontendReq::SET_FEATURES, &words([self.features]));
        }
        if !self.protocol.is_empty() {
            script.say(FrontendReq::GET_PROTOCOL_FEATURES, &[]);
            script.say(FrontendReq::SET_PROTOCOL_FEATURES, &words([self.protocol.bits()]));
        }
        if let Some(log) = &self.log {
            let (shape, file) = log.describe()?;
            let body = words([shape.mmap_size, shape.mmap_offset]);
            script.say_with(FrontendReq::SET_LOG_BASE, &body, vec![file]);
        }
        if let Some(socket) = self.channel.socket()? {
            script.say_with(FrontendReq::SET_BACKEND_REQ_FD, &[], vec![socket]);
        }
        let regions = self.memory.describe()?;
        for (index, (info, file)) in regions.into_iter().enumerate() {
            // The first ones as a table, whose message is made with its first.
            match script.0.last_mut() {
                Some(table) if (1..TABLE_MAX).contains(&index) => {
                    table.bytes.extend(region_words(info));
                    table.fds.push(file);
                    let body = (table.bytes.len() - HEADER_BYTES) as u32;
                    table.bytes[8..12].copy_from_slice(&body.to_ne_bytes());
                    table.bytes[12..16].copy_from_slice(&(index as u32 + 1).to_ne_bytes());
                }
                _ if index == 0 => {
                    let body = [halves(1, 0), region_words(info)].concat();
                    script.say_with(FrontendReq::SET_MEM_TABLE, &body, vec![file]);
                }
                _ => {
                    let body = [words([0]), region_words(info)].concat();
                    script.say_with(FrontendReq::ADD_MEM_REG, &body, vec![file]);
                }
            }
        }
        if self.protocol.contains(VhostUserProtocolFeatures::CONFIG) {
            let mut body = halves(WRITEBACK_OFFSET as u32, 1);
            body.extend([0; 5]);
            match self.device.cache_mode() {
                // Without the feature it cannot be said, and is writethrough to the new server as a mode not known.
                CacheMode::Writethrough if self.features & 1 << VIRTIO_BLK_F_CONFIG_WCE != 0 => {
                    script.say(FrontendReq::SET_CONFIG, &body);
                }
                // A client that reads the mode knows it.
                CacheMode::Writeback => script.say(FrontendReq::GET_CONFIG, &body),
                CacheMode::Writethrough | CacheMode::Unknown => {}
            }
        }
        if let Some(inflight) = &self.inflight {
            let (shape, file) = inflight.describe()?;
            let mut body = words([shape.mmap_size, shape.mmap_offset]);
            body.extend(
                [shape.num_queues, shape.queue_size, 0, 0]
                    .iter()
                    .flat_map(|half| half.to_ne_bytes()),
            );
            script.say_with(FrontendReq::SET_INFLIGHT_FD, &body, vec![file]);
        }
        for (index, vring) in (0u8..=u8::MAX).zip(&self.vrings) {
            vring.describe(index, self.features & PROTOCOL_FEATURES != 0, &mut script)?;
        }
        Ok(script.0)
    }
}

impl super::vring::Vring {
    fn describe(&self, index: u8, enables: bool, script: &mut Script) -> io::Result<()> {
        let number = u32::from(index);
        if self.size != 0 {
            script.say(FrontendReq::SET_VRING_NUM, &halves(number, self.size.into()));
        }
        script.say(
            FrontendReq::SET_VRING_BASE,
            &halves(number, self.next_available.into()),
        );
        if let Some(addresses) = self.addresses {
            let mut body = halves(number, self.log_address.is_some().into());
            body.extend(words([
                addresses.descriptors,
                addresses.used,
                addresses.available,
                self.log_address.unwrap_or_default(),
            ]));
            script.say(FrontendReq::SET_VRING_ADDR, &body);
        }
        for (code, event) in [
            (FrontendReq::SET_VRING_CALL, &self.call),
            (FrontendReq::SET_VRING_ERR, &self.error),
        ] {
            if let Some(fd) = event.file()? {
                script.say_event(code, index, Some(fd));
            }
        }
        if enables {
            let enabled = u32::from(self.enabled);
            script.say(FrontendReq::SET_VRING_ENABLE, &halves(number, enabled));
        }
        match &self.kick {
            super::vring::Kick::Unknown => {}
            super::vring::Kick::Event(file) => {
                let fd = OwnedFd::from(file.try_clone()?);
                script.say_event(FrontendReq::SET_VRING_KICK, index, Some(fd));
            }
            super::vring::Kick::Polled => script.say_event(FrontendReq::SET_VRING_KICK, index, None),
        }
        Ok(())
    }
}

/// The code of a message, and the first word of its body; zeros where there is none.
fn code_and_word(bytes: &[u8]) -> (u32, u64) {
    let code = bytes.first_chunk().map_or(0, |code| u32::from_ne_bytes(*code));
    let body = bytes.get(HEADER_BYTES..).and_then(<[u8]>::first_chunk);
    (code, body.map_or(0, |word| u64::from_ne_bytes(*word)))
}

impl PausedClient {
    pub(super) fn new(messages: BackendReqHandler<Mutex<Backend>>, backend: Arc<Mutex<Backend>>) -> Self {
        Self {
            messages,
            backend,
            kicks: Vec::new(),
        }
    }

    /// Returns the state of the client, for another server. This one may still continue with it.
    ///
    /// # Errors
    ///
    /// If the process has no descriptor left.
    pub fn state(&self) -> io::Result<ClientState> {
        Ok(ClientState {
            connection: self.messages.try_clone_connection()?,
            messages: lock(&self.backend).script()?,
        })
    }

    /// Forgets the client, who goes on with another server.
    pub fn forget(self) {
        lock(&self.backend).forget_channel();
    }

    /// Starts the queues, where they were.
    pub(super) fn start(&mut self) -> Result<(), MessageError> {
        let mut backend = lock(&self.backend);
        for (index, kick) in std::mem::take(&mut self.kicks) {
            backend.set_vring_kick(index, kick)?;
        }
        backend.start_all()
    }
}

impl VhostUserServer {
    /// Takes a client in that was another server's. Its queues do not run yet.
    ///
    /// # Errors
    ///
    /// [`HandOverError`], if this server cannot do what the client uses. The client has not noticed then.
    pub fn adopt(&self, state: ClientState) -> Result<PausedClient, HandOverError> {
        let (ours, teller) = UnixStream::pair()?;
        let connection = ours.try_clone()?;
        let mut client = self.receive(ours);
        for Message { bytes, fds } in state.messages {
            let (code, word) = code_and_word(&bytes);
            if code == FrontendReq::SET_VRING_KICK as u32 {
                let kick = fds.into_iter().next().map(File::from);
                client.kicks.push((word.to_le_bytes()[0], kick));
                continue;
            }
            let (header, body) = bytes.split_at(bytes.len().min(HEADER_BYTES));
            let raw: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
            teller
                .send_with_fds(&[header], &raw)
                .map_err(|error| HandOverError::Os(error.into()))?;
            (&teller).write_all(body)?;
            self.channel.watch(&connection)?;
            client
                .messages
                .handle_request()
                .map_err(|error| HandOverError::refused(code, &error))?;
        }
        // The answers to what was asked go nowhere, with `teller`.
        event::replace(client.messages.as_raw_fd(), state.connection.as_fd())?;
        Ok(client)
    }

    /// Closes the disk as a clean shutdown should, so that others may open the image, and keeps the workers. Nothing is
    /// served before [`VhostUserServer::reopen`].
    ///
    /// # Errors
    ///
    /// [`super::CloseError`]: the image may need repair on its next open, as after a power cut.
    pub fn close_disk(&self) -> Result<(), super::CloseError> {
        let info = self.device.disk().info();
        let closed = self.close_on_worker();
        self.reopen(Arc::new(DetachedDisk::new(info)));
        closed
    }

    /// Serves this disk from now on. It must be the same image, opened anew, and no queue may run.
    pub fn reopen(&self, disk: Arc<dyn block::Disk>) {
        self.device.set_disk(disk);
    }

    pub(super) fn go_on(&self, mut client: PausedClient) -> Result<PausedClient, ServeError> {
        if let Err(error) = client.start() {
            if lock(&client.backend).worker_gone() {
                return Err(ServeError::Worker(block::worker::WorkerGone));
            }
            tracing::warn!(%error, "cannot restart a queue");
        }
        Ok(client)
    }
}

#[cfg(test)]
mod tests {
    use super::super::VhostUserConfig;
    use super::*;
    use crate::testing::MemDisk;

    /// A server of one queue, without inflight tracking, to which a client comes that accepted `features` and `protocol`.
    fn refused(features: u64, protocol: VhostUserProtocolFeatures) -> HandOverError {
        let disk = MemDisk::new();
        let server = VhostUserServer::start(disk.disk(), &VhostUserConfig::default()).expect("a server");
        let mut script = Script::default();
        script.say(FrontendReq::SET_OWNER, &[]);
        script.say(FrontendReq::GET_FEATURES, &[]);
        script.say(FrontendReq::SET_FEATURES, &words([features | PROTOCOL_FEATURES]));
        script.say(FrontendReq::GET_PROTOCOL_FEATURES, &[]);
        script.say(FrontendReq::SET_PROTOCOL_FEATURES, &words([protocol.bits()]));
        let (connection, _client) = UnixStream::pair().expect("sockets");
        let adopted = server.adopt(ClientState {
            connection,
            messages: script.0,
        });
        adopted.expect_err("it is refused")
    }

    #[test]
    fn adopt_names_the_option_that_a_client_needs() {
        let none = VhostUserProtocolFeatures::empty();
        let queues = refused(1 << VIRTIO_BLK_F_MQ, none);
        assert!(matches!(queues, HandOverError::SeveralQueues), "{queues}");
        let inflight = refused(0, VhostUserProtocolFeatures::INFLIGHT_SHMFD);
        assert!(matches!(inflight, HandOverError::InflightTracking), "{inflight}");
        let other = refused(1 << 60, none).to_string();
        assert!(
            other.contains("message 2") && other.contains("0x1000000000000000"),
            "{other}"
        );
    }
}
