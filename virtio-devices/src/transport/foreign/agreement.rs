//! The agreement with a backend before a guest drives it: the protocol, the features, the configuration.
//!
//! Spec: vhost-user, "Front-end message types".

use std::io;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use block::worker::StartHook;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_GEOMETRY, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::link::{BackendError, Connection, Link};
use crate::blk::CONFIG_BYTES;
use crate::connect::Cancel;

/// `VHOST_USER_F_PROTOCOL_FEATURES`.
pub(super) const PROTOCOL_FEATURES: u64 = 1 << 30;
/// The offset of the number of queues in the configuration space: virtio 1.2, 5.2.4.
const QUEUES_OFFSET: usize = 34;

/// The features of a backend that a guest may have: those that ask of the transport only what is here.
fn passed_on() -> u64 {
    let bits = [
        VIRTIO_F_VERSION_1,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_BLK_F_SIZE_MAX,
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_GEOMETRY,
        VIRTIO_BLK_F_RO,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_CONFIG_WCE,
        VIRTIO_BLK_F_MQ,
        VIRTIO_BLK_F_DISCARD,
        VIRTIO_BLK_F_WRITE_ZEROES,
    ];
    bits.iter().fold(0, |set, bit| set | 1 << bit)
}

pub(super) type Config = [u8; CONFIG_BYTES];

/// A connection with a backend, and what was agreed upon.
#[derive(Debug)]
pub(super) struct Agreed {
    pub(super) connection: Connection,
    /// The features that a guest may have.
    pub(super) features: u64,
    /// True if the backend records requests in flight in memory of ours.
    pub(super) inflight: bool,
    pub(super) config: Config,
}

/// Connects and agrees about everything but the driver's features.
pub(super) fn agree(
    socket: &Path,
    queues: u16,
    patience: Duration,
    cancel: &Cancel,
) -> Result<Agreed, BackendError> {
    let connection = Connection::open(socket, queues, patience, cancel)?;
    let (features, inflight, config) = negotiate(&connection, queues)?;
    Ok(Agreed {
        connection,
        features,
        inflight,
        config,
    })
}

/// As [`agree`], on a thread that has run `on_start`, as has the one that watches the connection then.
pub(super) fn agree_after(
    on_start: &StartHook,
    socket: &Path,
    queues: u16,
    patience: Duration,
    cancel: &Cancel,
) -> Result<Agreed, BackendError> {
    let (on_start, place, cancel) = (on_start.clone(), socket.to_owned(), cancel.clone());
    let connect = move || {
        on_start.run().map_err(BackendError::Host)?;
        agree(&place, queues, patience, &cancel)
    };
    let died = |_| BackendError::Host(io::Error::other("the thread that connects has died"));
    thread(connect)
        .map_err(BackendError::Host)?
        .join()
        .map_err(died)?
}

/// A thread that connects.
pub(super) fn thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    std::thread::Builder::new()
        .name("connector".to_owned())
        .spawn(work)
}

/// Agrees with a backend about the protocol. Answers the features that a guest may have, whether the backend keeps note
/// of what is in flight, and its configuration.
fn negotiate(connection: &Connection, queues: u16) -> Result<(u64, bool, Config), BackendError> {
    use VhostUserProtocolFeatures as Protocol;
    let link = connection.link();
    let lacks = |what| BackendError::Lacks {
        socket: link.socket().to_owned(),
        what,
    };
    link.send("SET_OWNER", |backend| backend.set_owner())?;
    let features = link.send("GET_FEATURES", |backend| backend.get_features())?;
    if features & PROTOCOL_FEATURES == 0 {
        return Err(lacks("VHOST_USER_F_PROTOCOL_FEATURES"));
    }
    if features & 1 << VIRTIO_F_VERSION_1 == 0 {
        return Err(lacks("VIRTIO_F_VERSION_1"));
    }
    let offered = link.send("GET_PROTOCOL_FEATURES", |backend| backend.get_protocol_features())?;
    if !offered.contains(Protocol::CONFIG) {
        return Err(lacks("VHOST_USER_PROTOCOL_F_CONFIG"));
    }
    let known = Protocol::CONFIG
        | Protocol::MQ
        | Protocol::REPLY_ACK
        | Protocol::BACKEND_REQ
        | Protocol::INFLIGHT_SHMFD;
    let agreed = offered & known;
    link.send("SET_PROTOCOL_FEATURES", |backend| {
        backend.set_protocol_features(agreed)?;
        if agreed.contains(Protocol::REPLY_ACK) {
            backend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            link.answer();
        }
        Ok(())
    })?;
    let found = if agreed.contains(Protocol::MQ) {
        link.send("GET_QUEUE_NUM", |backend| backend.get_queue_num())?
    } else {
        1
    };
    if found < queues.into() {
        return Err(BackendError::Queues {
            socket: link.socket().to_owned(),
            found,
            asked: queues,
        });
    }
    if agreed.contains(Protocol::BACKEND_REQ) {
        link.send("SET_BACKEND_REQ_FD", |backend| {
            backend.set_backend_request_fd(connection.channel())
        })?;
    }
    let mut features = features & passed_on();
    if queues == 1 {
        features &= !(1 << VIRTIO_BLK_F_MQ);
    }
    let inflight = agreed.contains(Protocol::INFLIGHT_SHMFD);
    Ok((features, inflight, read_config(link, queues)?))
}

/// The backend's configuration, with the queues that there are here.
pub(super) fn read_config(link: &Link, queues: u16) -> Result<Config, BackendError> {
    let mut config = [0; CONFIG_BYTES];
    let flags = VhostUserConfigFlags::empty();
    let (_, bytes) = link.send("GET_CONFIG", |backend| {
        backend.get_config(0, CONFIG_BYTES as u32, flags, &config)
    })?;
    for (byte, value) in config.iter_mut().zip(bytes) {
        *byte = value;
    }
    config[QUEUES_OFFSET..QUEUES_OFFSET + 2].copy_from_slice(&queues.to_le_bytes());
    Ok(config)
}
