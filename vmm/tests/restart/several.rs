//! A server of several disks, with a client each.

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::client::{BLOCK, Client};
use crate::server::{Server, World};
use ringdisk_gen::Random;

/// Several disks with a client each.
pub(crate) struct Disks {
    pub(crate) world: World,
    pub(crate) sockets: Vec<String>,
    pub(crate) disks: Vec<String>,
    pub(crate) clients: Vec<Client>,
    pub(crate) random: Random,
}

impl Disks {
    pub(crate) const BLOCKS: usize = 256;

    pub(crate) fn new(count: usize) -> Self {
        let world = World::new("cluster_size=4096", Self::BLOCKS * BLOCK);
        for disk in 0..count {
            let image = world.path(&format!("{disk}.qcow2"));
            std::fs::copy(world.path("disk.qcow2"), image).expect("a copy");
        }
        Self {
            world,
            sockets: (0..count).map(|disk| format!("{disk}.sock")).collect(),
            disks: (0..count)
                .map(|disk| format!("path={disk}.qcow2,poll_us=0"))
                .collect(),
            clients: (0..count).map(|_| Client::new(Self::BLOCKS, true)).collect(),
            random: Random::new(0xd15c5),
        }
    }

    pub(crate) fn serve(&self, more: &[&str]) -> Server {
        self.serve_some(0..self.disks.len(), more)
    }

    pub(crate) fn serve_some(&self, some: Range<usize>, more: &[&str]) -> Server {
        let (sockets, disks) = (&self.sockets[some.clone()], &self.disks[some]);
        self.world.serve_all(sockets, disks, more)
    }

    /// Connects those clients whose server has gone.
    pub(crate) fn connect(&mut self) {
        for (client, socket) in self.clients.iter_mut().zip(&self.sockets) {
            if !client.is_connected() {
                client.take_answers();
                client.connect(&self.world.path(socket));
            }
        }
    }

    pub(crate) fn are_connected(&self) -> bool {
        self.clients.iter().all(Client::is_connected)
    }

    /// All clients work, in turns.
    pub(crate) fn work(&mut self, how_long: Duration) {
        let end = Instant::now() + how_long;
        while Instant::now() < end {
            for client in &mut self.clients {
                client.work(&mut self.random, Duration::from_micros(100));
            }
        }
    }

    pub(crate) fn drain(&mut self) {
        self.clients.iter_mut().for_each(Client::drain);
    }

    pub(crate) fn assert_contents(&self, leaks: bool) {
        for (disk, client) in self.clients.iter().enumerate() {
            let image = format!("{disk}.qcow2");
            self.world.assert_image_sound(&image, leaks);
            client.assert_contents(&self.world.contents_of(&image));
        }
    }
}
